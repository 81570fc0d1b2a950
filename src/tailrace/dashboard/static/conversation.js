// A rollout's facts and messages. All of it was written by a model, a task or a tool: it is shown as text, and nothing else.
import { Failed, ofRun } from "./api.js";
import { h, textBlock, visible } from "./dom.js";
import { compact, fixed, isNumber, NOTHING, seconds } from "./format.js";

/** The server cuts long texts: `{ cut, characters }` stands for one. */
const isCut = (value) => value !== null && typeof value === "object" && typeof value.cut === "string" && typeof value.characters === "number";

export function outcomeText(outcome) {
  return [outcome.state, outcome.reason].filter(Boolean).join(": ");
}

export const outcomeClass = (state) => ({ trained: "good", filtered: "warn", failed: "bad", cancelled: "warn" })[state] ?? "";

export function factsOf(record) {
  const versions = record.versions && (record.versions.min === record.versions.max ? `${record.versions.min}` : `${record.versions.min} to ${record.versions.max}`);
  const facts = [
    ["outcome", h("span", { class: `badge ${outcomeClass(record.outcome.state)}` }, outcomeText(record.outcome))],
    ["reward", h("b", {}, fixed(record.reward))],
    ...Object.entries(record.reward_components ?? {}).map(([name, value]) => [name, fixed(value)]),
    ["advantage", isNumber(record.advantage) ? (record.advantage > 0 ? "+" : "") + fixed(record.advantage) : NOTHING],
    ["turns", compact(record.turns)],
    ["tokens", record.tokens ? `${compact(record.completion_tokens)} sampled of ${compact(record.tokens)}${record.truncated ? ", cut for length" : ""}` : "none recorded"],
    record.branches > 1 && ["branches", String(record.branches)],
    versions && ["policy version", versions],
    versions && record.outcome.state === "trained" && ["staleness", fixed(record.step - 1 - record.versions.mean, 1)],
    isNumber(record.mean_logprob) && ["mean log-prob", fixed(record.mean_logprob)],
    ["took", seconds(record.duration_s)],
    record.attempt > 0 && ["attempt", String(record.attempt + 1)],
  ];
  return h("dl", { class: "facts" }, facts.filter(Boolean).map(([name, value]) => [h("dt", {}, visible(String(name))), h("dd", {}, value)]));
}

/** `place` says where the record is, to ask for the rest of what was cut: `{ run, kind, step, id }`. */
export function messagesOf(record, place) {
  const messages = Array.isArray(record.messages) ? record.messages : [];
  if (!messages.length) return h("p", { class: "soft" }, "No message was recorded.");
  return messages.map((message, number) => messageOf(message, number, place));
}

function messageOf(message, number, place) {
  const role = typeof message?.role === "string" ? message.role : "";
  const parts = [];
  if (message?.reasoning_content) parts.push(h("div", { class: "reasoning" }, contentOf(message.reasoning_content, `messages/${number}/reasoning_content`, place)));
  if (message?.content !== undefined && message.content !== null && message.content !== "") parts.push(contentOf(message.content, `messages/${number}/content`, place));
  for (const call of Array.isArray(message?.tool_calls) ? message.tool_calls : []) parts.push(callOf(call));
  return h("article", { class: `message ${["user", "assistant", "tool", "system"].includes(role) ? role : ""}` },
    h("div", { class: "role" }, visible(role || "message"), message?.name ? ` ${visible(String(message.name))}` : ""), parts.length ? parts : h("span", { class: "faint" }, "(empty)"));
}

function contentOf(content, at, place) {
  if (typeof content === "string") return textBlock(content);
  if (isCut(content)) return cutOf(content, at, place);
  if (Array.isArray(content)) return content.map((part, number) => (typeof part?.text === "string" || isCut(part?.text) ? contentOf(part.text, `${at}/${number}/text`, place) : jsonOf(part)));
  return jsonOf(content);
}

function cutOf(content, at, place) {
  const block = textBlock(content.cut);
  const button = h("button", { onclick: async () => {
    button.disabled = true;
    try {
      block.textContent = visible(String(await ofRun(place.run, "text", { kind: place.kind, step: place.step, id: place.id, at })));
      button.remove();
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      button.replaceWith(h("p", { class: "soft" }, error.message));
    }
  } }, `Show all ${compact(content.characters)} characters`);
  return h("div", {}, block, button);
}

function callOf(call) {
  const named = call?.function ?? {};
  const given = typeof named.arguments === "string" ? named.arguments : isCut(named.arguments) ? `${named.arguments.cut}…` : JSON.stringify(named.arguments ?? call, null, 1);
  return h("div", { class: "call" }, h("b", { class: "mono" }, visible(String(named.name ?? "tool call"))), textBlock(given, { class: "text mono" }));
}

export function jsonOf(value) {
  return h("pre", { class: "code", dir: "auto" }, visible(indented(value)));
}

const ONE_LINE = 64;

/** JSON with short lists and objects on one line. */
function indented(value, indent = "") {
  if (isCut(value)) return JSON.stringify(`${value.cut}… (${value.characters} characters)`);
  const whole = JSON.stringify(value) ?? "";
  if (value === null || typeof value !== "object" || whole.length + indent.length <= ONE_LINE) return whole;
  const inner = `${indent}  `;
  const parts = Array.isArray(value) ? value.map((one) => inner + indented(one, inner)) : Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${indented(one, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${parts.join(",\n")}\n${indent}${close}`;
}

/** A part that is folded away, and left out where it is empty. */
export function folded(title, value, open = false) {
  const isEmpty = value === undefined || value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);
  return !isEmpty && h("details", { open }, h("summary", {}, title), typeof value === "string" ? textBlock(value) : isCut(value) ? textBlock(`${value.cut}…`) : jsonOf(value));
}
