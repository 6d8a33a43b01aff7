"use strict";
// Draws the table of regions from the embedded JSON: rows, bars and timelines only when shown.
// Text is inserted as textContent, never as markup, because test names may hold anything.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIRST = innerWidth < 960 ? 4 : 10, PAGE = 200, SVG = "http://www.w3.org/2000/svg";
  const rows = data.rows.map((row, index) =>
    Object.fromEntries([["index", index], ...data.columns.map((name, i) => [name, row[i]])]));
  if (!rows.length) return;

  const VERDICTS = Object.keys(data.verdicts);
  const COLUMNS = [
    { key: "name", title: "Region", word: true },
    ...data.figures,
    { key: "timeline", title: "Timeline", word: true, unsorted: true },
    { key: "verdict", title: "Verdict", word: true },
  ];
  // With many figures a region has a line of its own above them, so that both have space.
  const stacked = data.figures.length > 6;
  const FIGURES = stacked ? COLUMNS.slice(1) : COLUMNS;
  const most = { peak_bytes: 1, retained_bytes: 1 };
  for (const row of rows)
    for (const key of Object.keys(most)) most[key] = Math.max(most[key], row[key]);

  const state = { filter: "", verdict: "", sort: "verdict", down: false, grouped: true, shown: FIRST };
  const byId = (id) => document.getElementById(id);

  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // Lets a line break after a folder, a class or a word of a name.
  function breakable(name) {
    const parts = name.split(/(?<=\/|::|_|\[)/);
    return make("code", {}, ...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }

  function line(values, low, high, name) {
    const path = document.createElementNS(SVG, "path");
    const across = 100 / Math.max(1, values.length - 1), span = high - low || 1;
    const points = values.map((value, i) =>
      `${(i * across).toFixed(2)},${(value === low && high === low ? 50 : 100 - (100 * (value - low)) / span).toFixed(2)}`);
    path.setAttribute("d", `M${points.join("L")}${values.length === 1 ? "h100" : ""}`);
    if (name) path.setAttribute("class", name);
    return path;
  }

  function drawing(name, label, ...paths) {
    const svg = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries(
      { class: name, viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label }))
      svg.setAttribute(key, value);
    svg.append(...paths);
    return svg;
  }

  function spark(row) {
    const levels = row.timeline.map((point) => point[0]);
    if (!levels.length) return "";
    const low = Math.min(...levels), high = Math.max(...levels);
    const label = `live after each of ${row.batches} batches: ${size(low)} to ${size(high)}`;
    return drawing("spark", label, line(levels, low, high));
  }

  const LIMITS = ["limit", "limit second", "limit third"];
  // The same figure as in the problems; the axis, its ticks and the limits come with the data.
  function chart(row) {
    const [title, low, high, ticks, limits, growth] = row.chart;
    const levels = row.timeline.map((point) => point[0] - row.start_bytes);
    const peaks = row.timeline.map((point) => point[1] - row.start_bytes);
    const drawn = (name, d) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      path.setAttribute("d", d);
      return path;
    };
    const straight = (name, left, first, last) => drawn(name, `M${left},${100 - first}L100,${100 - last}`);
    const judged = growth ? [
      drawn("reference", `M0,${100 - growth[3]}H100`),
      drawn(growth[5], `M${growth[1]},${100 - growth[3]}L${growth[2]},${100 - growth[4]}`)] : [];
    const warmup = growth ? [drawn("warmup", `M0,0H${growth[0]}V100H0z`)] : [];
    const label = `${row.batches} batches, ${size(Math.min(...levels))} to ${size(Math.max(...levels))} above the level at entry`;
    const plot = make("div", { className: "plot" }, drawing("", label, ...warmup,
      ...ticks.map(([share]) => straight("grid", 0, share, share)),
      line(peaks, low, high, "peak"), line(levels, low, high, "level"), ...judged,
      ...limits.map(([left, first, last], n) => straight(LIMITS[n % 3], left, first, last))));
    for (const [share, text] of ticks) {
      const tick = make("span", { className: "tick", textContent: text });
      tick.style.bottom = `${share}%`;
      plot.append(tick);
    }
    const every = row.step > 1 ? `, highest of every ${row.step}` : "";
    const key = (name, textContent) => make("span", { className: `key ${name}`, textContent });
    return make("figure", { className: "chart" }, make("p", { className: "unit", textContent: title }), plot,
      make("p", { className: "axis" }, make("span", { textContent: "batch 1" }), make("span", { textContent: `batch ${row.batches.toLocaleString("en")}` })),
      make("figcaption", {}, key("level", `live after each batch${every}`), " ", key("peak", "peak within it"), " ",
        ...limits.flatMap((limit, n) => [key(LIMITS[n % 3], limit[3]), " "]),
        ...(growth ? [key("warmup", "not judged, with the warm-up"), " ", key("reference", "reference level"), " ", key(growth[5], growth[6]), " "] : [])));
  }

  function bar(...parts) {
    return make("span", { className: "bar", ariaHidden: "true" }, ...parts.map(([share, name]) => {
      const part = make("i", { className: name });
      part.style.width = `${(100 * Math.max(0, share)).toFixed(2)}%`;
      return part;
    }));
  }

  function figure(row, key) {
    const text = key === "batches" ? String(row.batches || "-") : size(row[key]);
    const value = make("span", { className: "figure" }, make("span", { textContent: text }));
    if (key === "peak_bytes") {
      const base = Math.min(row.start_bytes, row.peak_bytes) / most.peak_bytes;
      value.append(bar([base, "base"], [row.peak_bytes / most.peak_bytes - base, ""]));
    }
    if (key === "retained_bytes") value.append(bar([row.retained_bytes / most.retained_bytes, "lost"]));
    return value;
  }

  function badge(row) {
    return make("span", { className: `verdict ${row.verdict.replace(/\W+/g, "-").replace(/-$/, "").toLowerCase()}`, textContent: row.verdict });
  }

  function detail(row) {
    const cell = make("td", { className: "detail", colSpan: FIGURES.length });
    cell.append(make("p", { textContent: `Test ${row.outcome}, measured in ${row.worker}. Start to peak: ${row.start_bytes.toLocaleString("en")} to ${row.peak_bytes.toLocaleString("en")} bytes; retained: ${row.retained_bytes.toLocaleString("en")} bytes.` }));
    for (const fact of row.extra) cell.append(make("p", { textContent: fact }));
    for (const problem of row.problems) cell.append(make("p", { textContent: problem }));
    if (row.chart) cell.append(chart(row));
    if (row.holders.length)
      cell.append(make("pre", { textContent: row.holders.join("\n") }));
    return make("tr", {}, cell);
  }

  function toggle(button, row) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    let last = button.closest("tr");
    if (stacked) last = last.nextSibling;
    if (open) last.nextSibling.remove();
    else last.after(detail(row));
  }

  function named(row) {
    const button = make("button", { type: "button" }, breakable(row.name));
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => toggle(button, row));
    const cell = make("td", { className: "name" }, button);
    if (row.equal > 1) cell.append(make("span", { className: "same", textContent: `${row.equal.toLocaleString("en")} equal regions` }));
    if (row.cause) cell.append(make("p", { className: "cause", textContent: row.cause }));
    return cell;
  }

  function valued(row, column) {
    const cell = make("td", { className: column.word ? "word" : "" });
    cell.dataset.label = column.title;
    if (column.key === "timeline") {
      cell.append(spark(row));
      if (!row.timeline.length) cell.classList.add("none");
    } else if (column.key === "verdict") cell.append(badge(row));
    else {
      cell.append(figure(row, column.key));
      if (row[column.key] === null || (column.key === "batches" && !row.batches)) cell.classList.add("none");
      if (row.broken.includes(column.key)) cell.classList.add("broke");
    }
    return cell;
  }

  function draw(row) {
    const name = named(row), cells = COLUMNS.slice(1).map((column) => valued(row, column));
    if (!stacked) return [make("tr", {}, name, ...cells)];
    name.colSpan = FIGURES.length;
    return [make("tr", { className: "region" }, name), make("tr", { className: "figures" }, ...cells)];
  }

  function compared(a, b) {
    const key = state.sort;
    if (key === "verdict") return VERDICTS.indexOf(a.verdict) - VERDICTS.indexOf(b.verdict);
    if (key === "name") return a.name < b.name ? -1 : a.name > b.name ? 1 : 0;
    return (a[key] ?? -Infinity) - (b[key] ?? -Infinity) || 0;
  }

  function chosen() {
    const wanted = state.filter.toLowerCase();
    const found = rows.filter((row) =>
      (!state.verdict || row.verdict === state.verdict) && row.name.toLowerCase().includes(wanted));
    const sign = state.down ? -1 : 1;
    // Of the regions with one verdict, those with the highest peaks are first.
    const byPeak = (a, b) => (state.sort === "verdict" ? b.peak_bytes - a.peak_bytes : 0);
    found.sort((a, b) => sign * compared(a, b) || byPeak(a, b) || a.index - b.index);
    const first = new Map();
    for (const row of found) {
      row.equal = 1;
      if (row.group !== null && state.grouped)
        if (first.has(row.group)) first.get(row.group).equal += 1;
        else first.set(row.group, row);
    }
    return found.filter((row) => row.group === null || !state.grouped || first.get(row.group) === row);
  }

  function render() {
    const found = chosen(), left = Math.max(0, found.length - state.shown);
    byId("body").replaceChildren(...found.slice(0, state.shown).flatMap(draw));
    byId("shown").textContent = `${(found.length - left).toLocaleString("en")} of ${found.length.toLocaleString("en")} shown${found.length < rows.length ? `, ${rows.length.toLocaleString("en")} in all` : ""}. Sizes are in MB (2**20 bytes) unless a unit is given.`;
    byId("more").hidden = !left;
    byId("more").textContent = `Show ${Math.min(PAGE, left)} more`;
    for (const th of byId("head").children) {
      if (th.dataset.key === state.sort) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
      if (th.firstChild.dataset) th.firstChild.lastChild.textContent = th.dataset.key === state.sort ? (state.down ? " ↓" : " ↑") : "";
    }
    byId("sort").value = state.sort === "index" ? "" : `${state.sort} ${state.down ? "down" : "up"}`;
  }

  function change(values) {
    Object.assign(state, { shown: PAGE }, values);
    render();
  }

  function sortBy(key) {
    const words = key === "name" || key === "verdict";
    change({ sort: key, down: state.sort === key ? !state.down : !words });
  }

  byId("table").classList.toggle("stacked", stacked);
  for (const column of FIGURES) {
    const th = make("th", { scope: "col", className: column.word ? "word" : "" });
    th.dataset.key = column.key;
    const title = make("button", { type: "button", disabled: !!column.unsorted }, column.title, make("span", {}));
    title.addEventListener("click", () => sortBy(column.key));
    th.append(title);
    byId("head").append(th);
  }
  const option = (value, textContent) => make("option", { value, textContent });
  byId("verdict").append(option("", `All (${rows.length.toLocaleString("en")})`), ...VERDICTS
    .filter((name) => data.verdicts[name]).map((name) => option(name, `${name} (${data.verdicts[name].toLocaleString("en")})`)));
  byId("sort").append(option("", "Order of collection"));
  for (const column of COLUMNS.filter((c) => !c.unsorted))
    for (const way of column.word ? ["up", "down"] : ["down", "up"])
      byId("sort").append(option(`${column.key} ${way}`, `${column.title}, ${way === "up" ? "ascending" : "descending"}`));
  byId("filter").addEventListener("input", (event) => change({ filter: event.target.value }));
  byId("verdict").addEventListener("change", (event) => change({ verdict: event.target.value }));
  byId("sort").addEventListener("change", (event) => {
    const [sort, way] = event.target.value.split(" ");
    change({ sort: sort || "index", down: way === "down" });
  });
  byId("grouped").addEventListener("change", (event) => change({ grouped: event.target.checked }));
  byId("grouping").hidden = !rows.some((row) => row.group !== null);
  byId("more").addEventListener("click", () => { state.shown += PAGE; render(); });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("regions").hidden = false;
  render();
})();
