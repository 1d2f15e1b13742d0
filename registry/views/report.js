/* The report's only script: speedups against a chosen baseline, sorting, searching, and links into what is folded.
   Without it the page says the same, against the fastest baseline. Names reach the page as text, never as markup. */
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const DASH = "–", WIDTH = 330, HEIGHT = 24, PAD = 12; // as in strips.py
  const SVG = "http" + "://www.w3.org/2000/svg"; // a name of the format, and no address that is asked

  /* --- against another baseline ------------------------------------------------------------------------- */

  const ratio = x => x == null ? DASH : x >= 1000 ? ">1000×" : x < 100 ? x.toFixed(2) + "×" : x.toFixed(0) + "×";
  const mean = xs => xs.length ? Math.exp(xs.reduce((sum, x) => sum + Math.log(x), 0) / xs.length) : null;
  const category = ([, low, high]) =>
    low == null || high == null ? "no interval" : high < 1 ? "slower" : low >= 1.5 ? "excellent"
      : low >= 1.2 ? "good" : low >= 1 ? "faster" : "undecided";
  const colour = found => found === "slower" ? "--bad"
    : found === "no interval" || found === "undecided" ? "--soft" : "--good";

  function draw(parent, kind, attributes, text) {
    const made = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text != null) made.textContent = text;
    parent.append(made);
    return made;
  }

  function canvas(place, height) {
    const svg = draw(place, "svg", { viewBox: `0 0 ${WIDTH} ${height}` });
    place.replaceChildren(svg);
    return svg;
  }

  function axis(values) {
    const begin = Math.log2(Math.min(0.8, ...values)) - 0.1, end = Math.log2(Math.max(1.6, ...values)) + 0.1;
    const scale = (WIDTH - 2 * PAD) / (end - begin);
    const close = scale * Math.log2(1.25) < 34 ? [0.8, 1.2, 1.5, 3] : [];
    const ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000]
      .filter(x => begin <= Math.log2(x) && Math.log2(x) <= end && !close.includes(x));
    return { at: x => PAD + (Math.log2(x) - begin) * scale, ticks };
  }

  function strip(place, found, shared) {
    const svg = canvas(place, HEIGHT);
    const stroke = (x, top, foot, name, width) =>
      draw(svg, "path", { d: `M${x} ${top}L${x} ${foot}`, style: `stroke:var(${name});stroke-width:${width}` });
    for (const x of shared.ticks) stroke(shared.at(x), 0, HEIGHT, x === 1 ? "--ink" : "--grid", 1);
    const middle = mean(found.map(x => x.ratio[0]));
    if (middle) stroke(shared.at(middle), 3, HEIGHT - 3, "--ink", 2.5);
    found.forEach((x, i) => {
      const style = `fill:var(${colour(category(x.ratio))});stroke:var(--paper);stroke-width:.8`;
      const cy = HEIGHT / 2 + (i % 3 - 1) * 4;
      const dot = draw(svg, "circle", { cx: shared.at(x.ratio[0]), cy, r: 3, style });
      draw(dot, "title", {}, `${x.case}: ${ratio(x.ratio[0])} vs ${x.rival}`);
    });
  }

  function emphasised(cell, text, strong) {
    cell.replaceChildren();
    const made = document.createElement(strong ? "b" : "span");
    made.textContent = text;
    cell.append(made);
  }

  function against(run, name) {
    const data = run.data, number = data.names.indexOf(name);
    const found = data.cases.map((x, place) => {
      const chosen = name === "" ? x.best : number;
      return { ...x, place, rival: data.names[chosen], ratio: x.ratios[chosen] };
    });
    const compared = found.filter(x => x.ratio);
    const shared = axis(compared.map(x => x.ratio[0]));
    for (const place of all("[data-f=head]", run.root)) {
      const svg = canvas(place, 16);
      for (const x of shared.ticks)
        draw(svg, "text", { x: shared.at(x), y: 8, dy: ".35em", "text-anchor": "middle", style: "fill:var(--soft);font-size:10px" }, x + "×");
    }
    for (const line of all("tr[data-operator], tr.total", run.root)) {
      const mine = compared.filter(x => line.classList.contains("total") || x.operator === line.dataset.operator);
      const cell = field => line.querySelector(`[data-f=${field}]`);
      const put = (field, text, value) => { const x = cell(field); x.textContent = text; x.dataset.v = value ?? ""; };
      const middle = mean(mine.map(x => x.ratio[0]));
      const whole = mine.length > 0 && mine.every(x => x.ratio[1] != null && x.ratio[2] != null);
      const low = whole ? mean(mine.map(x => x.ratio[1])) : null, high = whole ? mean(mine.map(x => x.ratio[2])) : null;
      emphasised(cell("mean"), ratio(middle), whole && (low > 1 || high < 1));
      cell("mean").dataset.v = middle ?? "";
      put("bounds", whole ? `[${low.toFixed(2)}, ${high.toFixed(2)}]` : middle ? "no interval" : DASH);
      const kinds = mine.map(x => category(x.ratio));
      const slower = kinds.filter(x => x === "slower").length;
      const faster = kinds.filter(x => ["excellent", "good", "faster"].includes(x)).length;
      put("faster", faster, faster); put("slower", slower, slower); put("undecided", mine.length - faster - slower, mine.length - faster - slower);
      cell("faster").classList.toggle("good", faster > 0); cell("slower").classList.toggle("bad", slower > 0);
      const values = mine.map(x => x.ratio[0]);
      const [best, worst] = values.length ? [Math.max(...values), Math.min(...values)] : [null, null];
      put("best", ratio(best), best); put("worst", ratio(worst), worst);
      if (cell("strip")) strip(cell("strip"), mine, shared);
    }
    for (const line of all("tr[data-case]", run.root)) {
      const x = found[line.dataset.case];
      const put = (field, text) => { line.querySelector(`[data-f=${field}]`).textContent = text; };
      put("rival", x.rival ?? DASH);
      const mark = line.querySelector("use");
      if (x.rival != null) mark.setAttribute("href", "#look" + data.looks[data.names.indexOf(x.rival)]);
      const cell = line.querySelector("[data-f=ratio]"), kind = x.ratio ? category(x.ratio) : "";
      cell.dataset.v = x.ratio ? x.ratio[0] : "";
      emphasised(cell, ratio(x.ratio && x.ratio[0]), x.ratio && (x.ratio[1] > 1 || (x.ratio[2] != null && x.ratio[2] < 1)));
      put("bounds", x.ratio && x.ratio[1] != null && x.ratio[2] != null ? `[${x.ratio[1].toFixed(2)}, ${x.ratio[2].toFixed(2)}]` : "");
      const chip = line.querySelector("[data-f=category]");
      chip.textContent = kind || "not measured";
      chip.className = "chip " + kind.replaceAll(" ", "-");
    }
    for (const x of all("[data-f=against]", run.root)) x.textContent = name === "" ? "the fastest baseline of each case" : name;
  }

  const runs = all("section.run").map(root => {
    const data = root.querySelector("script.against");
    return { root, data: data ? JSON.parse(data.textContent) : { names: [], cases: [] } };
  });
  const choice = document.getElementById("against");
  if (choice) choice.addEventListener("change", () => runs.forEach(x => x.data.cases.length && against(x, choice.value)));

  /* --- sorting ------------------------------------------------------------------------------------------ */

  function key(line, column) {
    const cell = line.cells[column];
    if (!cell) return null;
    const text = cell.dataset.v ?? cell.textContent.trim();
    const number = Number(text);
    return text === "" || text === DASH ? null : Number.isNaN(number) ? text : number;
  }

  function compare(a, b, way) {
    if (a === null || b === null) return (a === null) - (b === null); // what is not known stands last, both ways
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return way * order;
  }

  function sort(head) {
    const table = head.closest("table"), column = head.cellIndex;
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const x of all("th[aria-sort]", table)) x.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    for (const body of table.tBodies) {
      const lines = [...body.rows], fixed = x => x.classList.contains("case") || x.classList.contains("total");
      const order = lines.filter(x => !fixed(x)).map(x => [key(x, column), x]).sort((a, b) => compare(a[0], b[0], way));
      body.append(...lines.filter(x => x.classList.contains("case")), ...order.map(x => x[1]), ...lines.filter(x => x.classList.contains("total")));
    }
  }

  for (const head of all("table.sort thead th")) {
    head.tabIndex = 0;
    head.title = "sort";
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(head); });
  }

  /* --- searching ---------------------------------------------------------------------------------------- */

  const opened = new Set(), field = document.getElementById("search"), told = document.getElementById("found");

  function search() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean), active = words.length > 0;
    const fits = text => words.every(x => text.includes(x));
    document.body.classList.toggle("searching", active);
    for (const x of opened) x.open = false;
    opened.clear();
    let count = 0;
    for (const body of all("tbody.keep")) {
      const head = (body.dataset.text + " ").toLowerCase();
      let some = false;
      for (const line of body.rows) {
        if (line.classList.contains("case")) continue;
        line.hidden = active && !fits(head + line.textContent.toLowerCase());
        some ||= !line.hidden;
        count += !line.hidden;
      }
      body.hidden = active && !some;
    }
    for (const line of all("tr.found")) line.hidden = active && !fits((line.dataset.text ?? line.textContent).toLowerCase());
    for (const part of all("section.part")) {
      const lines = all("tbody.keep, tr.found", part);
      const some = lines.some(x => !x.hidden);
      part.hidden = active && !some;
      if (!active || !some) continue;
      for (const x of all("details.rows", part))
        if (!x.open && all("tbody.keep, tr.found", x).some(y => !y.hidden)) { x.open = true; opened.add(x); }
    }
    told.textContent = active ? `${count} row${count === 1 ? "" : "s"}` : "";
  }

  if (field) {
    let waiting;
    field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  }

  /* --- links -------------------------------------------------------------------------------------------- */

  function unfold() {
    const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let x = place; x; x = x.parentElement) if (x.tagName === "DETAILS") x.open = true;
    if (place) place.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  if (location.hash) unfold();

  const links = new Map(all("nav .links a").map(x => [x.getAttribute("href").slice(1), x]));
  const list = document.querySelector("nav .links");
  function fade() { // what is out of sight has no scrollbar, which would cover a third of a line
    const { scrollHeight, scrollTop, clientHeight, scrollWidth, scrollLeft, clientWidth } = list;
    const left = Math.max(scrollHeight - scrollTop - clientHeight, scrollWidth - scrollLeft - clientWidth);
    list.classList.toggle("more", left > 8);
  }
  function reveal() {
    const here = list.querySelector(".here")?.getBoundingClientRect(), frame = list.getBoundingClientRect();
    if (!here) return;
    const seen = here.left >= frame.left && here.right <= frame.right && here.top >= frame.top && here.bottom <= frame.bottom;
    if (!seen) list.scrollBy(here.left - frame.left, here.top - frame.top);
  }
  list.addEventListener("scroll", fade);
  addEventListener("resize", fade);
  const watch = new IntersectionObserver(seen => {
    for (const { target, isIntersecting } of seen) links.get(target.id)?.classList.toggle("here", isIntersecting);
    reveal();
  }, { rootMargin: "-60px 0px -60% 0px" });
  for (const id of links.keys()) { const x = document.getElementById(id); if (x) watch.observe(x); }
  for (const tools of all("nav .tools")) tools.hidden = false;
  fade(); // the tools take of the links' width
})();
