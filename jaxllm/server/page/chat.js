// A conversation with the model, streamed.

import { ApiError, ask, frames } from "./api.js";
import { showNumber, showSeconds } from "./metrics.js";
import { Pictures, contentOf, thumbnail } from "./pictures.js";
import { showText } from "./text.js";

const NEAR = 40; // pixels
const NO_TEMPLATE = /chat template/i;
const get = (id) => document.getElementById(id);

export class Chat {
  /** Send what is written; `status` knows the model's name, and `onKey` is called when the server asks for a key. */
  constructor(status, onKey) {
    this.status = status;
    this.onKey = onKey;
    this.messages = [];
    this.hasTemplate = true;
    this.running = null; // what aborts the answer on its way
    this.input = get("message");
    this.pictures = new Pictures(
      () => this.status.sees,
      (why) => this.notice(why),
    );
    this.transcript = get("transcript");
    this.isAtEnd = true;
    this.transcript.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.transcript;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    });
    new ResizeObserver(() => this.follow()).observe(this.transcript);
    get("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    get("stop").addEventListener("click", () => this.stop());
    get("clear").addEventListener("click", () => this.clear());
  }

  /** Stop the answer on its way; what has come of it stays. */
  stop() {
    this.running?.abort();
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.messages = [];
    this.transcript.replaceChildren(get("empty") ?? this.empty);
    get("clear").disabled = true;
    this.input.focus();
  }

  async send() {
    const text = this.input.value.trim();
    const isEmpty = !text && !this.pictures.list.length;
    if (isEmpty || this.running || !get("composer").reportValidity()) return;
    const pictures = this.pictures.take();
    const content = contentOf(text, pictures);
    this.empty ??= get("empty");
    this.empty.remove();
    const question = this.show("You", "user");
    showText(question.text, text);
    question.text.hidden = !text;
    if (pictures.length) question.text.before(row(pictures));
    const answer = this.show("Assistant", "assistant");
    this.input.value = "";
    this.setRunning(new AbortController(), answer);
    const messages = [...this.messages, { role: "user", content }];
    const result = new Answer(answer, () => this.follow());
    try {
      await this.stream(messages, result);
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.append(paragraph("error", error.message));
        if (error.status === 401) this.onKey();
      } else {
        result.ending = "stopped";
      }
    }
    result.finish();
    this.setRunning(null, answer);
    if (!question.isConnected) return; // the conversation was cleared
    if (result.content) this.messages = [...messages, { role: "assistant", content: result.content }];
    else if (!this.input.value && !this.pictures.list.length) {
      this.input.value = text; // so that Enter tries again
      this.pictures.put(pictures);
    }
    this.follow();
  }

  async stream(messages, result) {
    const { signal } = this.running;
    if (this.hasTemplate) {
      try {
        await result.read(await ask("v1/chat/completions", { body: this.body({ messages: withSystem(messages) }), signal }));
        return;
      } catch (error) {
        const isText = messages.every((each) => typeof each.content === "string");
        if (!isText || error.status !== 400 || !NO_TEMPLATE.test(error.message)) throw error;
        this.hasTemplate = false;
        this.notice("This model has no chat template: it goes on with the text as it stands.");
      }
    }
    const prompt = withSystem(messages)
      .map((each) => each.content)
      .join("\n");
    await result.read(await ask("v1/completions", { body: this.body({ prompt }), signal }));
  }

  body(own) {
    const given = Object.fromEntries(
      ["temperature", "top_p", "max_tokens"].filter((name) => get(name).value).map((name) => [name, get(name).valueAsNumber]),
    );
    if (!own.messages) given.max_tokens ??= 256; // the route's own is 16
    if (this.needsSampling()) {
      given.temperature ??= 0.7;
      given.min_p = 0.05;
    }
    const model = this.status.model ?? undefined;
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    return { ...own, ...given, model, stream: true, stream_options };
  }

  /** Whether the model leaves open how to sample: at the API's temperature of 1 small models ramble. It is said once. */
  needsSampling() {
    const { sampling } = this.status;
    if (!sampling || ["temperature", "top_p", "top_k", "min_p"].some((name) => name in sampling)) return false;
    get("temperature").placeholder = "0.7";
    get("sampling").hidden = false;
    return true;
  }

  notice(text) {
    get("notice").textContent = text;
    get("notice").hidden = false;
  }

  show(name, role) {
    const article = document.createElement("article");
    article.className = role;
    article.append(paragraph("who", name), (article.text = document.createElement("div")));
    article.text.className = "text";
    this.transcript.append(article);
    this.isAtEnd = true;
    this.follow();
    return article;
  }

  setRunning(controller, answer) {
    const hadFocus = document.activeElement === get("stop");
    this.running = controller;
    answer.ariaBusy = controller !== null; // or a screen reader would read each token
    answer.classList.toggle("busy", controller !== null);
    get("send").hidden = controller !== null;
    get("stop").hidden = controller === null;
    get("clear").disabled = !this.transcript.querySelector("article");
    if (hadFocus) this.input.focus();
  }

  /** Stay at the end, unless the reader has scrolled up. */
  follow() {
    if (this.isAtEnd) this.transcript.scrollTop = this.transcript.scrollHeight;
  }
}

/** An answer on its way, and its figures. */
class Answer {
  constructor(article, onGrowth) {
    this.article = article;
    this.onGrowth = onGrowth;
    this.content = "";
    this.tokens = 0;
    this.ending = "";
    this.began = performance.now();
    this.first = this.last = null;
    this.figures = paragraph("figures", "waiting for the first token");
    article.append(this.figures);
  }

  /** Take in a stream. Throws ApiError for one that fails on its way. */
  async read(response) {
    let isWhole = false;
    for await (const frame of frames(response)) {
      if (frame === "data: [DONE]") isWhole = true;
      else if (frame.startsWith("data: ")) this.take(JSON.parse(frame.slice(6)));
      else if (frame.startsWith(": prefill ")) this.figures.textContent = `reading the prompt, ${frame.slice(10)} tokens`;
    }
    if (!isWhole) throw new ApiError("The answer has broken off.", 0);
  }

  take(chunk) {
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    const [choice] = chunk.choices;
    if (!choice) return;
    if (choice.finish_reason === "length") this.ending = "max tokens reached";
    const piece = choice.delta ? choice.delta.content : choice.text;
    if (!piece) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.content += piece;
    this.draw ??= requestAnimationFrame(() => {
      this.draw = null;
      this.show();
      this.onGrowth();
    });
  }

  show() {
    showText(this.article.text, this.content);
    const shown = [];
    if (this.first !== null) shown.push(`TTFT ${showSeconds((this.first - this.began) / 1000)}`);
    if (this.last > this.first) shown.push(`${showNumber((this.tokens - 1) / ((this.last - this.first) / 1000))} tokens/s`);
    if (this.tokens) shown.push(`${showNumber(this.tokens)} tokens`);
    if (this.ending) shown.push(this.ending);
    this.figures.textContent = shown.join(" · ");
  }

  finish() {
    cancelAnimationFrame(this.draw);
    this.show();
  }
}

function withSystem(messages) {
  const content = get("system").value.trim();
  return content ? [{ role: "system", content }, ...messages] : messages;
}

function row(pictures) {
  const made = document.createElement("div");
  made.className = "pictures";
  made.append(...pictures.map(thumbnail));
  return made;
}

function paragraph(className, text) {
  const made = document.createElement("p");
  made.className = className;
  made.textContent = text;
  return made;
}
