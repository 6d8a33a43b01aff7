"use strict";
// Draws memory over time from the embedded data: a stacked area with one band for each module or line.
// A level is stored as runs: the index of a moment, and the bytes from there on.
(() => {
  const data = JSON.parse(document.getElementById("tl-data").textContent);
  const SVG = "http://www.w3.org/2000/svg", WIDE = 1000, LEAST_EVENTS = 4;
  const UNITS = [["GB", 2 ** 30], ["MB", 2 ** 20], ["KB", 1024], ["B", 1]];
  const BEFORE = "before the region";
  const byId = (id) => document.getElementById(`tl-${id}`);
  const plot = byId("plot");
  // What is shown: the memory, its bands, the events at both edges, the moment and the chosen band.
  let drawn = null, bands = [], from = 0, to = 1, moment = 0, chosen = -1;

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const whole = (number) => number.toLocaleString("en");

  function spread(runs, length) {
    const levels = new Float64Array(length);
    for (let i = 0; i < runs.length; i += 2)
      levels.fill(runs[i + 1], runs[i], i + 2 < runs.length ? runs[i + 2] : length);
    return levels;
  }

  function unpacked(memory) {
    if (memory.unpacked) return memory.unpacked;
    const moments = [];
    for (let i = 0; i < memory.moments.length; i += 2)
      for (let n = 0; n < memory.moments[i + 1]; n += 1) moments.push(memory.moments[i] + n);
    const levels = (runs) => spread(runs, moments.length);
    const views = Object.fromEntries(Object.entries(memory.views).map(([name, view]) =>
      [name, view.map(([label, runs]) => ({ label, levels: levels(runs) }))]));
    const reserve = memory.reserve && { levels: levels(memory.reserve) };
    return (memory.unpacked = { ...memory, moments, views, before: levels(memory.before), reserve });
  }

  // The index of the last moment at or before an event.
  function momentAt(event) {
    let low = 0, high = drawn.moments.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (drawn.moments[middle] <= event) low = middle; else high = middle - 1;
    }
    return low;
  }

  const total = (at) => bands.reduce((sum, band) => sum + band.levels[at], 0);
  const share = (event) => (event - from) / (to - from);

  function setUp() {
    const region = data[byId("region").value];
    byId("memory").replaceChildren(...region.memories.map((memory, value) => make("option", { value, textContent: memory.name })));
    byId("memories").hidden = region.memories.length < 2;
    showMemory();
  }

  function showMemory() {
    const region = data[byId("region").value];
    drawn = unpacked(region.memories[byId("memory").value]);
    [from, to, moment] = [0, Math.max(1, region.events), drawn.peak];
    showView();
  }

  function showView() {
    const view = drawn.views[byId("view").value];
    bands = [{ label: BEFORE, levels: drawn.before, style: "var(--base)" },
      ...view.map((band, n) => ({ ...band, style: `var(--t${n % 12})` }))];
    bands.forEach((band) => { band.atPeak = band.levels[drawn.peak]; });
    chosen = -1;
    byId("blocks").hidden = true;
    byId("bands").replaceChildren(...(drawn.reserve ? [reserveRow(drawn.reserve)] : []), ...bands.map(row));
    draw();
  }

  function row(band, number) {
    const swatch = make("i", {});
    swatch.style.background = band.style;
    const name = number
      ? make("button", { type: "button", ariaPressed: "false" }, swatch, make("span", { textContent: band.label }))
      : make("span", { className: "tl-plain" }, swatch, make("span", { textContent: band.label }));
    if (number) name.addEventListener("click", () => { choose(number); byId("blocks-title").focus(); });
    band.cell = make("td", {});
    band.row = make("tr", {}, band.cell, make("td", { textContent: sizeWithUnit(band.atPeak) }), make("td", { className: "word" }, name));
    return band.row;
  }

  function reserveRow(reserve) {
    const name = make("span", { className: "tl-plain" }, make("i", { className: "tl-line" }), make("span", { textContent: "reserved by the allocator, the line" }));
    reserve.cell = make("td", {});
    return make("tr", {}, reserve.cell, make("td", { textContent: sizeWithUnit(reserve.levels[drawn.peak]) }), make("td", { className: "word" }, name));
  }

  function roundStep(step) {
    const power = 10 ** Math.floor(Math.log10(step));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= step * 0.999);
  }

  const x = (at) => (WIDE * Math.min(1, Math.max(0, share(drawn.moments[at])))).toFixed(1);

  function line(levels, first, last, high) {
    let there = "";
    for (let at = first; at <= last; at += 1)
      there += `${there ? "V" : `M${x(at)},`}${(WIDE * (1 - levels[at] / high)).toFixed(1)}H${at < last ? x(at + 1) : WIDE}`;
    return there;
  }

  function path(lower, upper, first, last, high) {
    const y = (value) => (WIDE * (1 - value / high)).toFixed(1);
    let there = `M${x(first)},${y(upper[first])}`, back = "";
    for (let at = first; at <= last; at += 1) {
      const end = at < last ? x(at + 1) : WIDE;
      there += `V${y(upper[at])}H${end}`;
      back = `H${x(at)}${back}`;
      back = `V${y(lower[at])}${back}`;
    }
    return `${there}${back}Z`;
  }

  function svgPath(className, d, fill) {
    const element = document.createElementNS(SVG, "path");
    element.setAttribute("class", className);
    element.setAttribute("d", d);
    element.setAttribute("vector-effect", "non-scaling-stroke");
    if (fill) element.style.fill = fill;
    return element;
  }

  function draw() {
    const first = momentAt(from), last = momentAt(to), count = drawn.moments.length;
    const tops = [new Float64Array(count)];
    for (const band of bands)
      tops.push(tops[tops.length - 1].map((below, at) => below + band.levels[at]));
    const shown = [tops[bands.length], ...(drawn.reserve ? [drawn.reserve.levels] : [])];
    const room = drawn.reserve ? 1.02 : 1;  // a line at the upper edge would be half hidden
    const highest = room * Math.max(1, ...shown.flatMap((levels) => [...levels.subarray(first, last + 1)]));
    const [unit, factor] = UNITS.find((row) => highest >= row[1]);
    const step = roundStep(highest / factor / 4), high = Math.ceil(highest / factor / step) * step * factor;
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDE} ${WIDE}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    bands.forEach((band, n) => {
      band.path = svgPath("band", path(tops[n], tops[n + 1], first, last, high), band.style);
      svg.append(band.path);
    });
    plot.replaceChildren(svg);
    for (let value = 0; value <= high / factor + step / 2; value += step) {
      const level = value * factor / high;
      svg.append(svgPath("grid", `M0,${WIDE * (1 - level)}h${WIDE}`));
      const tick = make("span", { className: "tick", textContent: value.toFixed(digits) });
      tick.style.bottom = `${100 * level}%`;
      plot.append(tick);
    }
    if (drawn.reserve) svg.append(svgPath("reserve", line(drawn.reserve.levels, first, last, high)));
    const peak = drawn.moments[drawn.peak];
    if (peak >= from && peak <= to) {
      const side = share(peak) > 0.8 ? "right" : share(peak) < 0.2 ? "left" : "";
      plot.append(mark(`peak ${side}`, peak, make("span", { textContent: `peak ${sizeWithUnit(total(drawn.peak))}` })));
    }
    byId("unit").textContent = `${unit} live on ${drawn.name}`;
    byId("first").textContent = `event ${whole(Math.ceil(from))}`;
    byId("last").textContent = whole(Math.floor(to));
    plot.setAttribute("aria-valuemin", Math.ceil(from));
    plot.setAttribute("aria-valuemax", Math.floor(to));
    byId("note").textContent = note(last - first + 1);
    highlight();
    look(moment);
  }

  function note(moments) {
    const region = data[byId("region").value], events = Math.floor(to) - Math.ceil(from) + 1;
    const some = moments < events ? ": all of those around the peak, elsewhere the highest of every few" : "";
    const notes = [`Exact to the byte at ${whole(Math.min(moments, events))} of ${whole(events)} moments${some}.`];
    if (drawn.reserve && some) notes.push("Between them the line has the highest reserve.");
    if (region.merged) notes.push(`There were so many blocks that ${whole(region.merged)} small ones of at most ${sizeWithUnit(region.merged_bytes)} were merged with others from the same line; they are drawn as their average.`);
    if (region.lost) notes.push(`${whole(region.lost)} allocations are missing, because there were too many.`);
    if (drawn.unknown) notes.push(`At the peak ${sizeWithUnit(drawn.unknown)} more were live that no allocation shows.`);
    return notes.join(" ");
  }

  function mark(name, event, ...children) {
    const line = make("div", { className: `tl-mark ${name}` }, ...children);
    line.style.left = `${100 * share(event)}%`;
    return line;
  }

  // Show what was live at a moment, without changing which one is selected.
  function look(at) {
    plot.querySelector(".tl-mark.cursor")?.remove();
    const event = drawn.moments[at];
    if (event >= from && event <= to) plot.append(mark("cursor", event));
    const when = at === drawn.peak ? ", the peak" : event === 0 ? ", the start" : "";
    const reserved = drawn.reserve ? `, ${sizeWithUnit(drawn.reserve.levels[at])} reserved,` : "";
    const text = `${sizeWithUnit(total(at))} live${reserved} at event ${whole(event)}${when}`;
    if (drawn.reserve) drawn.reserve.cell.textContent = sizeWithUnit(drawn.reserve.levels[at]);
    byId("moment").textContent = text;
    plot.setAttribute("aria-valuenow", event);
    const most = [...bands].sort((a, b) => b.levels[at] - a.levels[at]).slice(0, 3);
    plot.setAttribute("aria-valuetext", `${text}. ${most.map((band) => `${band.label}: ${sizeWithUnit(band.levels[at])}`).join("; ")}`);
    for (const band of bands) {
      band.cell.textContent = sizeWithUnit(band.levels[at]);
      band.row.className = band.levels[at] ? "" : "none";
    }
  }

  function select(at) {
    moment = Math.max(0, Math.min(drawn.moments.length - 1, at));
    const event = drawn.moments[moment];
    if (event < from || event > to) zoom(event - (to - from) / 2, event + (to - from) / 2);
    else look(moment);
  }

  function zoom(first, last) {
    const events = Math.max(1, data[byId("region").value].events);
    const width = Math.min(events, Math.max(LEAST_EVENTS, last - first));
    from = Math.max(0, Math.min(events - width, (first + last - width) / 2));
    to = from + width;
    draw();
  }

  function zoomBy(times) {
    const middle = Math.max(from, Math.min(to, drawn.moments[moment])), width = (to - from) * times;
    zoom(middle - (middle - from) * times, middle - (middle - from) * times + width);
  }

  function highlight() {
    plot.classList.toggle("some", chosen >= 0);
    bands.forEach((band, n) => {
      band.path.classList.toggle("chosen", n === chosen);
      band.row.querySelector("button")?.setAttribute("aria-pressed", String(n === chosen));
    });
  }

  function choose(number) {
    chosen = chosen === number ? -1 : number;
    byId("blocks").hidden = chosen < 1;
    if (chosen >= 1) listBlocks();
    highlight();
  }

  function listBlocks() {
    const which = Object.keys(drawn.views).indexOf(byId("view").value), band = bands[chosen];
    const groups = drawn.groups.filter((group) => group[8][which] === chosen - 1);
    const listed = groups.reduce((sum, group) => sum + group[4], 0), rest = band.atPeak - listed;
    byId("blocks-title").textContent = `Blocks of ${band.label}: ${sizeWithUnit(band.atPeak)} at the peak`;
    byId("rows").replaceChildren(...groups.map((group) => blockRow(group, drawn.places[group[0]])));
    byId("rest").textContent = groups.length && rest <= 0 ? ""
      : `${groups.length ? `${sizeWithUnit(rest)} at the peak is in smaller blocks` : "Its blocks are too small to be listed"}.`;
  }

  function blockRow([, each, count, atPeak, bytes, live, first, last], [line, code, module, inside, callers, holders]) {
    const events = live || !last ? `${whole(first)} to the end` : `${whole(first)} to ${whole(last)}`;
    const where = make("td", { className: "word" }, make("code", { textContent: line || inside || "outside Python code, such as in a backward pass" }));
    if (code) where.append(make("code", { textContent: code }));
    for (const text of [module && `in module ${module}`, line && inside, ...holders.map((name) => `held by ${name}`)])
      if (text) where.append(make("div", { textContent: text }));
    if (callers.length)
      where.append(make("details", {}, make("summary", { textContent: "called from" }), ...callers.map((caller) => make("code", { textContent: caller }))));
    const cell = (textContent) => make("td", { textContent });
    return make("tr", {}, cell(atPeak ? `${whole(atPeak)}: ${sizeWithUnit(bytes)}` : "none"),
      cell(`${whole(count)} of ${each ? sizeWithUnit(each) : "other sizes"}`), cell(live ? whole(live) : "none"), cell(events), where);
  }

  const eventAt = (pointer) => {
    const box = plot.getBoundingClientRect();
    return from + (to - from) * Math.max(0, Math.min(1, (pointer.clientX - box.left) / box.width));
  };

  function bandAt(pointer, at) {
    const box = plot.getBoundingClientRect();
    let level = [...plot.querySelectorAll("path.band")].findIndex((shape) => shape === document.elementFromPoint(pointer.clientX, pointer.clientY));
    if (level < 0 || !bands[level].levels[at]) level = -1;
    return box.height ? level : -1;
  }

  let pressed = null, brush = null, tip = null;
  function endHover() {
    tip?.remove();
    tip = null;
    look(moment);
  }

  plot.addEventListener("pointerdown", (pointer) => {
    if (pointer.button) return;
    pressed = { x: pointer.clientX, event: eventAt(pointer) };
    if (pointer.pointerType === "mouse") plot.setPointerCapture(pointer.pointerId);
  });
  plot.addEventListener("pointermove", (pointer) => {
    const event = eventAt(pointer), at = momentAt(event);
    look(at);
    if (pressed && pointer.pointerType === "mouse" && Math.abs(pointer.clientX - pressed.x) > 4) {
      brush ??= plot.appendChild(make("div", { className: "tl-brush" }));
      brush.style.left = `${100 * share(Math.min(event, pressed.event))}%`;
      brush.style.width = `${100 * Math.abs(event - pressed.event) / (to - from)}%`;
      tip?.remove();
      tip = null;
      return;
    }
    const number = bandAt(pointer, at);
    tip ??= plot.appendChild(make("div", { className: "tl-tip" }));
    const here = number < 0 ? [] : [make("b", { textContent: `${sizeWithUnit(bands[number].levels[at])}: ${bands[number].label}` })];
    const reserved = drawn.reserve ? `, ${sizeWithUnit(drawn.reserve.levels[at])} reserved` : "";
    tip.replaceChildren(...here, `${sizeWithUnit(total(at))} live${reserved} at event ${whole(drawn.moments[at])}`);
    const right = share(event) > 0.5;
    tip.style.left = right ? "" : `calc(${100 * share(event)}% + 12px)`;
    tip.style.right = right ? `calc(${100 * (1 - share(event))}% + 12px)` : "";
  });
  plot.addEventListener("pointerup", (pointer) => {
    if (!pressed) return;
    const event = eventAt(pointer), start = pressed.event, dragged = brush;
    pressed = null;
    brush?.remove();
    brush = null;
    if (dragged) return zoom(Math.min(start, event), Math.max(start, event));
    const at = momentAt(event), number = bandAt(pointer, at);
    select(at);
    if (number >= 1) choose(number);
  });
  plot.addEventListener("pointercancel", () => { pressed = null; brush?.remove(); brush = null; endHover(); });
  plot.addEventListener("pointerleave", () => { if (!pressed) endHover(); });
  plot.addEventListener("dblclick", () => zoom(0, Infinity));
  plot.addEventListener("keydown", (press) => {
    const far = Math.max(1, Math.round((momentAt(to) - momentAt(from)) / 10));
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far, PageDown: -far };
    if (press.ctrlKey || press.metaKey || press.altKey) return;
    if (press.key in steps) select(moment + steps[press.key]);
    else if (press.key === "Home") select(momentAt(from) + (drawn.moments[momentAt(from)] < from ? 1 : 0));
    else if (press.key === "End") select(momentAt(to));
    else if (press.key === "p" || press.key === "P") select(drawn.peak);
    else if (press.key === "+" || press.key === "=") zoomBy(0.5);
    else if (press.key === "-") zoomBy(2);
    else return;
    press.preventDefault();
  });
  byId("closer").addEventListener("click", () => zoomBy(0.5));
  byId("wider").addEventListener("click", () => zoomBy(2));
  byId("whole").addEventListener("click", () => zoom(0, Infinity));
  byId("to-peak").addEventListener("click", () => select(drawn.peak));
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("region").append(...data.map((region, value) => make("option", { value, textContent: region.name })));
  byId("view").append(...Object.keys(data[0].memories[0].views).map((name) => make("option", { value: name, textContent: name })));
  byId("region").addEventListener("change", setUp);
  byId("memory").addEventListener("change", showMemory);
  byId("view").addEventListener("change", showView);
  setUp();
})();
