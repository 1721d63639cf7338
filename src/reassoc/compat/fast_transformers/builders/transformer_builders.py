"""Transformers from parameters by name."""

from __future__ import annotations

from typing import Any

from ..attention import AttentionLayer
from ..recurrent.attention import RecurrentAttentionLayer, RecurrentCrossAttentionLayer
from ..recurrent.transformers import (
    RecurrentTransformerDecoder,
    RecurrentTransformerDecoderLayer,
    RecurrentTransformerEncoder,
    RecurrentTransformerEncoderLayer,
)
from ..transformers import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from ._transformer import BaseTransformerBuilder
from .attention_builders import (
    AttentionBuilder,
    BaseAttentionBuilder,
    RecurrentAttentionBuilder,
    RecurrentCrossAttentionBuilder,
    unknown,
)


class BaseTransformerEncoderBuilder(BaseTransformerBuilder):
    """An encoder of classes that a derived builder names."""

    def __init__(self) -> None:
        super().__init__()
        self._attention_builder = self._get_attention_builder()
        self._attention_type = "full"

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError(f"{type(self).__name__} must define _get_attention_builder()")

    def _get_attention_layer_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_attention_layer_class()")

    def _get_encoder_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_encoder_class()")

    def _get_encoder_layer_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_encoder_layer_class()")

    def _attention_builders(self) -> list[BaseAttentionBuilder]:
        return [self._attention_builder]

    @property
    def attention(self) -> BaseAttentionBuilder:
        """The builder of attentions."""
        return self._attention_builder

    @property
    def attention_type(self) -> str:
        """Name of the attention; see :meth:`BaseAttentionBuilder.get`."""
        return self._attention_type

    @attention_type.setter
    def attention_type(self, value: str) -> None:
        self._attention_type = _known(value, self._attention_builder, "attention_type")

    def get(self) -> Any:
        """The encoder."""
        attention = (self._get_attention_layer_class(), self.attention, self.attention_type)
        return self._build(self._get_encoder_class(), self._get_encoder_layer_class(), [attention])


class TransformerEncoderBuilder(BaseTransformerEncoderBuilder):
    """:class:`TransformerEncoder`, from the parameters of the base and ``attention_type``."""

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_encoder_class(self) -> Any:
        return TransformerEncoder

    def _get_encoder_layer_class(self) -> Any:
        return TransformerEncoderLayer


class RecurrentEncoderBuilder(BaseTransformerEncoderBuilder):
    """:class:`RecurrentTransformerEncoder`, from the parameters of the base and ``attention_type``."""

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentAttentionBuilder()

    def _get_attention_layer_class(self) -> Any:
        return RecurrentAttentionLayer

    def _get_encoder_class(self) -> Any:
        return RecurrentTransformerEncoder

    def _get_encoder_layer_class(self) -> Any:
        return RecurrentTransformerEncoderLayer


class BaseTransformerDecoderBuilder(BaseTransformerBuilder):
    """A decoder of classes that a derived builder names."""

    def __init__(self) -> None:
        super().__init__()
        self._self_attention_builder = self._get_self_attention_builder()
        self._cross_attention_builder = self._get_cross_attention_builder()
        self._self_attention_type = self._cross_attention_type = "full"

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError(f"{type(self).__name__} must define _get_self_attention_builder()")

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError(f"{type(self).__name__} must define _get_cross_attention_builder()")

    def _get_self_attention_layer_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_self_attention_layer_class()")

    def _get_cross_attention_layer_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_cross_attention_layer_class()")

    def _get_decoder_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_decoder_class()")

    def _get_decoder_layer_class(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define _get_decoder_layer_class()")

    def _attention_builders(self) -> list[BaseAttentionBuilder]:
        return [self._self_attention_builder, self._cross_attention_builder]

    @property
    def self_attention(self) -> BaseAttentionBuilder:
        """The builder of self-attentions."""
        return self._self_attention_builder

    @property
    def self_attention_type(self) -> str:
        """Name of the self-attention."""
        return self._self_attention_type

    @self_attention_type.setter
    def self_attention_type(self, value: str) -> None:
        self._self_attention_type = _known(value, self._self_attention_builder, "self_attention_type")

    @property
    def cross_attention(self) -> BaseAttentionBuilder:
        """The builder of cross-attentions."""
        return self._cross_attention_builder

    @property
    def cross_attention_type(self) -> str:
        """Name of the cross-attention."""
        return self._cross_attention_type

    @cross_attention_type.setter
    def cross_attention_type(self, value: str) -> None:
        self._cross_attention_type = _known(value, self._cross_attention_builder, "cross_attention_type")

    def get(self) -> Any:
        """The decoder."""
        attentions = [
            (self._get_self_attention_layer_class(), self.self_attention, self.self_attention_type),
            (self._get_cross_attention_layer_class(), self.cross_attention, self.cross_attention_type),
        ]
        return self._build(self._get_decoder_class(), self._get_decoder_layer_class(), attentions)


class TransformerDecoderBuilder(BaseTransformerDecoderBuilder):
    """:class:`TransformerDecoder`, from the base's parameters and the types of its two attentions."""

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_self_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_cross_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_decoder_class(self) -> Any:
        return TransformerDecoder

    def _get_decoder_layer_class(self) -> Any:
        return TransformerDecoderLayer


class RecurrentDecoderBuilder(BaseTransformerDecoderBuilder):
    """:class:`RecurrentTransformerDecoder`, from the base's parameters and the types of both attentions."""

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentAttentionBuilder()

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentCrossAttentionBuilder()

    def _get_self_attention_layer_class(self) -> Any:
        return RecurrentAttentionLayer

    def _get_cross_attention_layer_class(self) -> Any:
        return RecurrentCrossAttentionLayer

    def _get_decoder_class(self) -> Any:
        return RecurrentTransformerDecoder

    def _get_decoder_layer_class(self) -> Any:
        return RecurrentTransformerDecoderLayer


def _known(attention_type: str, builder: BaseAttentionBuilder, what: str) -> str:
    if not builder.validate_attention_type(attention_type):
        raise ValueError(unknown(attention_type, builder, what))
    return attention_type
