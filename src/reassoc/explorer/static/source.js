// Where answers come from: this machine's server, or the page itself if it was exported.
import { encode, setup } from "explorer/state";

export const frozen = "answers" in setup;

export async function compute(panel, settings) {
  if (frozen) {
    const found = setup.answers[panel][settings.map((pair) => pair.join("=")).join("&")];
    if (!found) throw new Error("This file does not hold an answer for these settings. For any settings, run: reassoc explore");
    return found;
  }
  let response;
  try {
    response = await fetch(`api/${panel}?${encode(settings)}`);
  } catch {
    throw new Error("The explorer does not answer. Is reassoc explore still running?");
  }
  const answer = await response.json().catch(() => ({ error: `The explorer answered with status ${response.status}.` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
