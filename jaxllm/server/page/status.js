// The server's state: asked for every two seconds while the page is seen, shown as figures, charts and a table.

import { ApiError, ask } from "./api.js";
import { Chart } from "./chart.js";
import { between, read, showNumber, showSeconds, showShare } from "./metrics.js";

const INTERVAL = 2000; // milliseconds
const LONGEST = 3 * INTERVAL; // a longer time between two readings, as in sleep, has no place in the charts
const ROWS = 150;
const get = (id) => document.getElementById(id);

export class Status {
  /** Show the state, and call `onKey` when the server asks for a key. */
  constructor(onKey) {
    this.onKey = onKey;
    this.model = null; // the name that requests give
    this.sees = false; // whether messages may have pictures
    this.needsKey = false;
    this.timer = null;
    this.last = null; // the last reading, and when it was taken
    this.rows = [];
    this.speed = new Chart(get("speed"), { show: showNumber, isLine: true });
    this.ttft = new Chart(get("ttft"), { show: showSeconds, isLine: false });
    this.cards = []; // what /v1/models says of each name
    get("models").addEventListener("change", () => this.choose(get("models").value));
    get("values").addEventListener("toggle", () => this.showRows());
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Ask now, and from now on, if the page is seen. */
  restart() {
    clearTimeout(this.timer);
    this.turn = {};
    this.last = null;
    if (!document.hidden) this.run(this.turn);
  }

  async run(turn) {
    await this.refresh();
    if (turn === this.turn) this.timer = setTimeout(() => this.run(turn), INTERVAL);
  }

  async refresh() {
    const isUp = await this.checkHealth();
    if (!isUp) this.model = null; // another server may come in its place
    if (!isUp || this.needsKey) return;
    try {
      if (this.model === null) await this.showServer();
      else if (!get("models").hidden) await this.showModels();
      this.showFigures(read(await (await ask("metrics", limit())).text()));
    } catch (error) {
      if (error.status !== 401) return; // the state has been shown already
      this.needsKey = true;
      this.onKey();
    }
  }

  /** Show whether requests are taken; return whether a server is there at all. */
  async checkHealth() {
    try {
      await ask("health", limit());
      this.showState("ready", "Requests are taken.");
      return true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const state = { 500: "dead", 503: /sleep/.test(error.message) ? "asleep" : "draining" }[error.status];
      this.showState(state ?? "unreachable", error.message);
      return state !== undefined;
    }
  }

  showState(state, why) {
    const pill = get("state");
    if (pill.dataset.state !== state) pill.textContent = state;
    pill.dataset.state = state;
    pill.title = why;
  }

  async showServer() {
    this.version = (await (await ask("version", limit())).json()).version;
    await this.showModels();
  }

  /** Show the model, or which of several is chosen, and the states of all. */
  async showModels() {
    this.cards = (await (await ask("v1/models", limit())).json()).data;
    const models = this.cards.filter((card) => card.parent === null);
    const isOne = models.every((card) => card.max_model_len !== null && card.root === models[0].root);
    const states = this.cards.map(({ id, status }) => new Option(status === "absent" ? id : `${id} · ${status}`, id));
    const choice = get("models");
    if (choice.hidden || states.length !== choice.options.length) choice.replaceChildren(...states);
    states.forEach((state, i) => (choice.options[i].text = state.text)); // in place, so that an open list stays open
    choice.hidden = isOne;
    get("model").classList.toggle("hidden", !isOne);
    const isKnown = this.cards.some((card) => card.id === this.model);
    this.choose(isKnown ? this.model : this.cards[0].id);
  }

  choose(name) {
    const { id, max_model_len, default_sampling_params, capabilities } = this.cards.find((card) => card.id === name);
    get("model").textContent = get("models").value = id;
    document.title = `${id} · jaxllm`;
    const length = max_model_len === null ? "" : ` · context of ${max_model_len.toLocaleString("en")} tokens`;
    get("about").textContent = `jaxllm ${this.version}${length}`;
    this.model = id;
    this.sampling = default_sampling_params;
    this.sees = capabilities.vision === true;
    get("add-picture").hidden = !this.sees;
  }

  showFigures(figures) {
    const now = performance.now();
    get("running").textContent = showNumber(figures.running);
    get("waiting").textContent = showNumber(figures.waiting);
    get("preemptions").textContent = showNumber(figures.preemptions);
    get("hits").textContent = showShare(figures.prefixQueries > 0 ? figures.prefixHits / figures.prefixQueries : null);
    get("programs").textContent = figures.isWarm === 0 ? `${showNumber(figures.compiled)} compiled` : "all compiled";
    get("kv").textContent = showShare(figures.kvUse);
    get("kv-meter").value = figures.kvUse ?? 0;
    get("kv-size").textContent = figures.kvTokens ? `of ${figures.kvTokens.toLocaleString("en")} tokens` : "";
    if (this.last !== null && now - this.last.when <= LONGEST) {
      this.add(between(this.last.figures, figures, (now - this.last.when) / 1000));
    } else {
      this.add({ speed: null, ttft: null, itl: null });
    }
    this.last = { figures, when: now };
  }

  add(means) {
    const time = Date.now() / 1000;
    this.speed.add(time, means.speed);
    this.ttft.add(time, means.ttft);
    if (means.itl !== null) get("itl").textContent = showSeconds(means.itl);
    this.rows.unshift([new Date().toLocaleTimeString(), showNumber(means.speed), showSeconds(means.ttft), showSeconds(means.itl)]);
    this.rows.length = Math.min(this.rows.length, ROWS);
    this.showRows();
  }

  showRows() {
    if (!get("values").open) return;
    const rows = this.rows.map((cells) => {
      const row = document.createElement("tr");
      for (const cell of cells) row.insertCell().textContent = cell;
      return row;
    });
    get("values").querySelector("tbody").replaceChildren(...rows);
  }
}

function limit() {
  return { signal: AbortSignal.timeout(LONGEST) };
}
