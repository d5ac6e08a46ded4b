// A chart of one figure over the last minutes, drawn in SVG.

const SPAN = 300; // seconds
const LEAST_SPAN = 60;
const [LEFT, RIGHT, TOP, BOTTOM] = [50, 6, 8, 18]; // pixels around what is drawn

export class Chart {
  /** Draw into a figure, whose output has the last value. A line is filled below; dots are of means that may lack. */
  constructor(figure, { show, isLine }) {
    this.show = show;
    this.isLine = isLine;
    this.name = figure.querySelector("figcaption").textContent;
    this.output = figure.querySelector("output");
    this.plot = figure.querySelector(".plot");
    this.svg = element("svg", { role: "img" });
    this.plot.append(this.svg);
    this.points = [];
    this.pointed = null;
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** Add the value of a time in seconds; null where there is none. */
  add(time, value) {
    this.points.push({ time, value });
    while (this.points[0].time < time - SPAN) this.points.shift();
    this.draw();
  }

  /** Show the value that was measured nearest to a place, instead of the last. */
  point(x) {
    this.pointed = x;
    this.draw();
  }

  draw() {
    const known = this.points.filter((each) => each.value !== null);
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (!width || !height) return;
    const end = this.points.at(-1)?.time ?? 0;
    const span = Math.min(SPAN, Math.max(LEAST_SPAN, end - (this.points[0]?.time ?? end)));
    const top = roundUp(Math.max(...known.map((each) => each.value), 0));
    const x = (time) => LEFT + (1 - (end - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(
      ...this.axes(width, height, top, span, y),
      ...(this.isLine ? this.line(x, y) : this.dots(known, x, y)),
      ...this.mark(known, x, y),
    );
    this.describe(known, span);
  }

  axes(width, height, top, span, y) {
    const labels = [0, top / 2, top].flatMap((value) => [
      element("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value ? this.show(value) : "0"),
    ]);
    const ago = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
    return [
      ...labels,
      element("text", { x: LEFT, y: height - 3 }, ago),
      element("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, "now"),
    ];
  }

  line(x, y) {
    const drawn = [];
    for (const run of runs(this.points)) {
      const path = run.map((each) => `${x(each.time).toFixed(1)},${y(each.value).toFixed(1)}`).join("L");
      drawn.push(element("path", { class: "area", d: `M${x(run[0].time)},${y(0)}L${path}L${x(run.at(-1).time)},${y(0)}Z` }));
      drawn.push(element("path", { class: "line", d: `M${path}` }));
    }
    return drawn;
  }

  dots(known, x, y) {
    return known.map((each) => element("circle", { class: "dot", cx: x(each.time), cy: y(each.value), r: 2.5 }));
  }

  mark(known, x, y) {
    const pointed = this.pointed;
    const nearest =
      pointed !== null && known.length
        ? known.reduce((a, b) => (Math.abs(x(a.time) - pointed) <= Math.abs(x(b.time) - pointed) ? a : b))
        : null;
    const shown = nearest ?? known.at(-1);
    this.output.textContent = shown ? this.show(shown.value) : "–";
    if (!nearest) return [];
    const place = x(nearest.time);
    const when = new Date(nearest.time * 1000).toLocaleTimeString();
    const anchor = place > this.plot.clientWidth / 2 ? "end" : "start";
    return [
      element("line", { x1: place, x2: place, y1: TOP, y2: y(0), class: "cursor" }),
      element("circle", { class: "dot", cx: place, cy: y(nearest.value), r: 4 }),
      element("text", { x: place + (anchor === "end" ? -6 : 6), y: TOP + 6, "text-anchor": anchor, class: "when" }, when),
    ];
  }

  describe(known, span) {
    const values = known.map((each) => each.value);
    const all = values.length
      ? `now ${this.show(values.at(-1))}, least ${this.show(Math.min(...values))}, most ${this.show(Math.max(...values))}`
      : "no values yet";
    this.svg.setAttribute("aria-label", `${this.name}, the last ${Math.round(span)} seconds: ${all}`);
  }
}

/** Yield the stretches of points that have values. */
function* runs(points) {
  let run = [];
  for (const each of points) {
    if (each.value !== null) run.push(each);
    else if (run.length) {
      yield run;
      run = [];
    }
  }
  if (run.length) yield run;
}

/** Return the least of 1, 2, 4, 6, 8 and 10 times a power of ten that is not below a value. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= value * 0.9999);
}

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.textContent = text;
  return made;
}
