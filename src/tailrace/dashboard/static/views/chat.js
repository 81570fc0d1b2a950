// A conversation with a policy: each reply in the view of tokens, with how sure it was of each.
import { Failed, say } from "../api.js";
import { h, textBlock } from "../dom.js";
import { TokenCanvas, Tokens } from "../token_canvas.js";
import { drawDetail } from "./tokens.js";

const SAMPLED = 1, MOST_HEIGHT = 420;
const ABOUT = { "running policy": "The policy of this run, as it is now: nobody trains on what it says here.", "served model": "What `tailrace serve` answers with." };

export async function show(target, context) {
  const { run, detail, alive } = context;
  const names = Object.keys(detail.chats);
  if (!names.length) {
    target.append(howTo(context));
    document.addEventListener("run", () => { if (Object.keys(detail.chats).length) dispatchEvent(new CustomEvent("again")); }, { signal: alive });
    return;
  }
  const log = h("div", {}), replies = (context.replies = []);
  let messages = []; // of one conversation: the next has a list of its own
  const chosen = h("select", { "aria-label": "Who answers", onchange: () => begin() }, names.map((name) => h("option", { value: name }, name)));
  const about = h("p", { class: "soft" });
  const input = h("textarea", { "aria-label": "Message", placeholder: "A message; Ctrl+Enter sends it" });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 1 });
  const limit = h("input", { type: "number", min: 1, max: 4096, step: 1, value: 256 });
  const send = h("button", {}, "Send");
  const forget = () => { for (const canvas of replies.splice(0)) canvas.destroy(); };
  const begin = () => { messages = []; forget(); log.replaceChildren(); send.disabled = false; about.textContent = `${ABOUT[chosen.value]} It is at ${detail.chats[chosen.value]}.`; };
  const ask = async () => {
    const text = input.value, conversation = messages;
    if (!text.trim() || send.disabled) return;
    send.disabled = true;
    input.value = "";
    messages.push({ role: "user", content: text });
    log.append(h("article", { class: "message user" }, h("div", { class: "role" }, "user"), textBlock(text)));
    try {
      const reply = await say(run, chosen.value, conversation, { temperature: Number(temperature.value), max_tokens: Number(limit.value) });
      if (conversation !== messages || alive.aborted) return;
      messages.push({ role: "assistant", content: reply.text });
      answer(log, reply, replies);
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      if (conversation !== messages) return;
      messages.pop();
      input.value ||= text;
      log.append(h("div", { class: "error", role: "alert" }, error.message));
    } finally {
      if (conversation === messages) {
        send.disabled = false;
        input.focus();
      }
    }
  };
  begin();
  alive.addEventListener("abort", forget);
  send.addEventListener("click", ask);
  input.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey) ask(); });
  target.append(h("div", { class: "bar" }, h("label", {}, "who answers", chosen)), about, log,
    h("div", { class: "panel pad chat", style: { marginTop: "10px" } }, input, h("div", { class: "bar", style: { margin: "8px 0 0" } }, send, h("label", {}, "temperature", temperature), h("label", {}, "at most", limit, "tokens"), h("button", { class: "plain", onclick: begin }, "Begin anew"))));
}

/** A conversation is nowhere but in its view, which is not made anew for other colours. */
export function repaint({ replies = [] }) {
  for (const canvas of replies) canvas.later();
}

/** As a rollout's tokens are shown, only as high as it is long. */
function answer(log, reply, replies) {
  const role = h("div", { class: "role" }, `assistant · ${reply.texts.length} tokens · ended by ${reply.finish_reason}`);
  if (!reply.texts.length) {
    log.append(h("article", { class: "message assistant" }, role, textBlock(reply.text)));
    return;
  }
  const tokens = new Tokens();
  tokens.append({ texts: reply.texts, logprobs: reply.logprobs, origins: reply.texts.map(() => SAMPLED) });
  const detail = h("aside", { class: "panel pad", "aria-live": "polite", "aria-label": "The token" });
  const canvas = new TokenCanvas(tokens, { onChoose: (at) => drawDetail(detail, tokens, at, { step: 0 }), label: "Reply" });
  replies.push(canvas);
  drawDetail(detail, tokens, -1);
  log.append(h("article", { class: "message assistant" }, role, h("div", { class: "tokens" }, h("div", {}, canvas.element), detail)));
  canvas.resize();
  Object.assign(canvas.element.style, { height: `${Math.min(MOST_HEIGHT, canvas.room.offsetHeight + 2)}px`, minHeight: "0" });
  canvas.resize();
}

function howTo({ run, detail }) {
  const newest = detail.checkpoints.at(-1);
  return h("div", { class: "panel pad chat" }, h("h3", {}, "Nothing answers yet"),
    h("p", {}, "The policy of a run answers while the run goes on, where the run has a gateway: start it with ", h("code", {}, "--gateway.port 8000"), "."),
    h("p", {}, newest ? `Or serve its newest checkpoint, ${newest}, and name it to this page:` : "Once the run has a checkpoint, it can be served, and named to this page:"),
    h("pre", { class: "code panel pad" }, `tailrace serve runs/${run}/checkpoints/${newest ?? "step_..."} --http 127.0.0.1:8000 --http-key chat.key\ntailrace ui runs --chat http://127.0.0.1:8000 --chat-key chat.key`));
}
