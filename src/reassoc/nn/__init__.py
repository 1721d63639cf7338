"""Modules: attention layers, a language model and an encoder-decoder, all chosen by one small config."""

from .block import Block, FeedForward, attention
from .cache import KeyValueCache
from .config import AttentionConfig, ModelConfig
from .convolution import ShortConvolution
from .encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from .gates import Gates
from .language_model import LanguageModel, LanguageModelConfig
from .linear import LinearAttention
from .mixer import Mixer
from .redraw import RedrawSchedule
from .rotary import Rotary
from .rotated import RotatedState
from .softmax import SoftmaxAttention
from .state import MixerState, ModelState

__all__ = [
    "AttentionConfig",
    "Block",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "FeedForward",
    "Gates",
    "KeyValueCache",
    "LanguageModel",
    "LanguageModelConfig",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "ModelConfig",
    "ModelState",
    "RedrawSchedule",
    "Rotary",
    "RotatedState",
    "ShortConvolution",
    "SoftmaxAttention",
    "attention",
]
