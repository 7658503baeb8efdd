// Elements, tables, scales and one kind of plot: lines with error bars. All text goes in as text nodes.
const DRAWN = new Set(["svg", "g", "path", "line", "rect", "text"]);
const MARKERS = [
  "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
  "M-3.7-3.7h7.4v7.4h-7.4z",
  "M0-5L4.8 3.6H-4.8z",
  "M0-5.4L5.4 0L0 5.4L-5.4 0z",
  "M0 5L4.8-3.6H-4.8z",
  "M-1.6-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
  "M-4.6-2.4L-2.4-4.6L0-2.2L2.4-4.6L4.6-2.4L2.2 0L4.6 2.4L2.4 4.6L0 2.2L-2.4 4.6L-4.6 2.4L-2.2 0z",
  "M0-5.2L5-1.6L3.1 4.3H-3.1L-5-1.6z",
  "M-4.6-4.6H4.6L-4.6 4.6H4.6z",
];
const COLOURS = 8;

// What is null, false or empty is left out.
function make(tag, attributes = {}, ...children) {
  const node = DRAWN.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== false && child !== ""));
  return node;
}

// Rows of texts or of ready cells; the first `labels` columns hold words.
function table(columns, rows, labels = 1) {
  const cell = (tag) => (content, i) => content.nodeType ? content
    : make(tag, { class: i < labels && "text", scope: tag === "th" && "col" }, content);
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {},
    make("thead", {}, make("tr", {}, columns.map(cell("th")))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell("td")))))));
}

// The full cache, which comes first where it was measured, is no press: it has the colour of the text.
const nth = (press) => press - (FULL + 1);
const colour = (press) => (press === FULL ? "full" : `p${nth(press) % COLOURS}`);
const marker = (press) => (press === FULL ? "" : MARKERS[nth(press) % MARKERS.length]);

// The line and marker of a press, as in the plots.
function key(press) {
  return make("svg", { class: `key ${colour(press)}`, viewBox: "-14 -7 28 14", "aria-hidden": "true" },
    make("path", { class: "line", d: "M-13 0H13" }), make("path", { class: "dot", d: marker(press) }));
}

// From 0 to just above the largest value, with round ticks.
function linear(largest) {
  const power = 10 ** Math.floor(Math.log10(largest / 4));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => largest / size < 6.1);
  const ticks = Array.from({ length: Math.ceil(largest / step - 0.01) + 1 }, (_, i) => +(i * step).toFixed(6));
  return { ticks, at: (value) => value / ticks.at(-1) };
}

function logarithmic(smallest) {
  const all = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];
  const low = all.filter((tick) => tick <= Math.min(smallest, 0.5)).pop() ?? smallest;
  return { ticks: all.filter((tick) => tick >= low), at: (value) => 1 - Math.log(Math.max(value, low)) / Math.log(low) };
}

/* Draws into the element `host`. x, y: scales; points: [{press, ratio, x, y, e, told}], the last being a tooltip's lines;
   reference: {x, y, e, label}, any of them; pick: called with a selected point; summary: what a screen reader hears. */
function plot(host, { x, y, xLabel, yLabel, points, reference, pick, summary }) {
  const width = Math.max(host.clientWidth, 230);
  const height = Math.min(Math.max(width * 0.7, 210), 380);
  const box = { left: 34, right: width - 8, top: 22, bottom: height - 36 };
  const px = (value) => box.left + x.at(value) * (box.right - box.left);
  const py = (value) => box.bottom - y.at(value) * (box.bottom - box.top);
  const across = (value, name) => make("line", { class: name, x1: box.left, x2: box.right, y1: py(value), y2: py(value) });
  const down = (value, name) => make("line", { class: name, x1: px(value), x2: px(value), y1: box.top, y2: box.bottom });

  const frame = make("g", {},
    y.ticks.map((tick) => [across(tick, tick ? "gridline" : "axis"),
      make("text", { x: box.left - 6, y: py(tick) + 4, "text-anchor": "end" }, tick)]).flat(),
    x.ticks.map((tick) => [down(tick, "gridline"),
      make("text", { x: px(tick), y: box.bottom + 16, "text-anchor": "middle" }, tick)]).flat(),
    make("text", { x: 0, y: 11 }, yLabel), make("text", { x: box.right, y: height - 4, "text-anchor": "end" }, xLabel));
  if (reference) {
    const { x: at, y: level, e } = reference;
    const band = { x: box.left, width: box.right - box.left, y: py(level + e), height: py(level - e) - py(level + e) };
    if (e) frame.append(make("rect", { class: "reference-band", ...band }));
    frame.append(across(level, "reference"), at ? down(at, "reference") : "",
      make("text", { class: "reference-label", x: box.right, y: 11, "text-anchor": "end" }, reference.label));
  }

  // The first press is drawn last, over the others.
  const presses = [...new Set(points.map(({ press }) => press))].sort((a, b) => b - a);
  const spots = [];
  const series = presses.map((press) => {
    const own = points.filter((point) => point.press === press).sort((a, b) => a.ratio - b.ratio).map((point) => {
      const [left, top] = [px(point.x), py(point.y)];
      return { ...point, left, top, dot: make("path", { class: "dot", d: marker(press), transform: `translate(${left} ${top})` }) };
    });
    spots.push(...own);
    const bars = own.filter(({ e }) => e).map(({ left, y: mean, e }) => make("path", { class: "bar",
      d: `M${left} ${py(mean + e)}V${py(mean - e)}m-3 0h6M${left - 3} ${py(mean + e)}h6` }));
    const line = make("path", { class: "line", d: own.map(({ left, top }, i) => `${i ? "L" : "M"}${left} ${top}`).join("") });
    return make("g", { class: `series ${colour(press)}`, "data-press": press }, bars, line, own.map(({ dot }) => dot));
  });

  const picture = make("svg", { class: "plot", role: "img", "aria-label": summary, height, viewBox: `0 0 ${width} ${height}` },
    frame, series);
  const show = (event) => {
    const area = picture.getBoundingClientRect();
    const far = ({ left, top }) => Math.hypot(left - event.clientX + area.left, top - event.clientY + area.top);
    // Of points at the same place the upper one
    const nearest = spots.reduce((one, other) => (one && far(one) < far(other) ? one : other), null);
    const spot = nearest && far(nearest) < 28 ? nearest : null;
    for (const { dot } of spots) dot.classList.toggle("near", dot === spot?.dot);
    picture.classList.toggle("picks", spot !== null && pick !== null);
    tell(spot, event);
    return spot;
  };
  // A finger does not hover: its first tap on a point shows the figures, as coming near does for a mouse.
  let tapped = null;
  picture.addEventListener("pointermove", show);
  picture.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") tell(null); });
  picture.addEventListener("click", (event) => {
    const spot = show(event);
    const picked = event.pointerType !== "touch" || spot === tapped;
    tapped = spot;
    if (spot && pick && picked) { tell(null); pick(spot); }
  });
  host.replaceChildren(picture);
}

// Shows the figures of a spot beside the pointer and fades all other presses, in every plot; null ends that.
function tell(spot, event) {
  highlight(spot && spot.press);
  const tip = document.getElementById("tip");
  tip.hidden = !spot;
  if (!spot) return;
  tip.replaceChildren(make("b", {}, spot.told[0]), ...spot.told.slice(1).flatMap((line) => [line, make("br")]));
  const left = Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(left, scrollX + 8)}px`;
  tip.style.top = `${event.pageY + 16}px`;
}

function highlight(press) {
  for (const group of document.querySelectorAll(".series")) {
    group.classList.toggle("dim", press !== null && +group.dataset.press !== press);
  }
}
