// The site's one script. Pages are whole without it; with it histories are drawn, cases filtered, any two sources
// compared. Names come from journals that anybody may have written: they are set as text, never as markup.
"use strict";

const kernelmark = (() => {
  const root = document.querySelector(".operator, .run") ? "../" : "";
  const waiting = new Map();
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function element(tag, attributes, ...children) {
    const out = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "class") out.className = value;
      else if (name.startsWith("on")) out.addEventListener(name.slice(2), value);
      else out.setAttribute(name, value);
    }
    out.append(...children.filter((x) => x !== null && x !== undefined));
    return out;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-6 && Math.abs(x) < 1e9
    ? x.toLocaleString("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 }) : x.toExponential(3));
  const counted = (n) => `${n} row${n === 1 ? "" : "s"}`;
  const percent = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x * 100).toFixed(1)} %`;
  // An interval is missing where there was one process.
  const half = (value, low, high) => (value <= 0 ? "" : low === null || high === null ? " 1 process"
    : ` ±${(Math.max(high - value, value - low) / value * 100).toFixed(1)} %`);

  // Many rows of a run stand on pages of their own, so many on each: as facts.py has it.
  const rowOf = (run, place) => `run/${run.file}${run.each ? `.${2 + Math.floor(place / run.each)}` : ""}.html#row-${place}`;

  // Histories -------------------------------------------------------------------------------------------------

  // A line of the data is drawn as one series for each comparability key: what does not compare is not joined.
  function seriesOf(chart, count) {
    const out = [];
    chart.forEach((line, place) => {
      for (const key of new Set(line.keys)) {
        const values = new Array(count).fill(undefined);
        line.keys.forEach((k, i) => { if (k === key) values[line.runs[i]] = line.values[i]; });
        out.push({ line, place, values });
      }
    });
    return out;
  }

  function draw(figure, page, chart, table, beside) {
    const used = [...new Set(chart.flatMap((x) => x.runs))].sort((a, b) => a - b);
    const places = new Map(used.map((x, i) => [x, i]));
    const lines = chart.map((x) => ({ ...x, runs: x.runs.map((y) => places.get(y)) }));
    const series = seriesOf(lines, used.length);
    const ours = lines.findIndex((x) => x.kind === 0);
    const best = lines.findIndex((x) => x.name === beside);
    const rival = best >= 0 ? best : lines.findIndex((x) => x.kind === 1);
    let strong = ours >= 0 ? new Set([ours, rival].filter((x) => x >= 0)) : new Set([Math.max(rival, 0)]);
    let all = false, pinned = null, plot = null;

    const readout = element("div", { class: "readout", "aria-live": "polite" });
    const holder = element("div", {});
    const whole = element("button", { type: "button", "aria-pressed": "false", onclick: () => {
      all = !all; whole.setAttribute("aria-pressed", String(all)); make();
    } }, "all values, log scale");
    const legend = element("span", {}, "Whiskers: 95 % interval over processes; of one process there is none. Band: where 95 % of reruns of unchanged code lie (A/A). "
      + "Dashed: the comparability key changes.");
    figure.append(element("div", { class: "bar-of-buttons" }, whole, legend), holder, readout);

    const rows = new Map();
    table.querySelectorAll("tbody tr").forEach((row) => {
      const place = lines.findIndex((x) => x.name === row.cells[0].textContent);
      if (place < 0) return;
      rows.set(place, row);
      row.cells[0].prepend(element("i", { class: "key" }));
      row.addEventListener("click", (event) => {
        if (event.target.closest("a")) return;
        if (strong.has(place)) strong.delete(place); else strong.add(place);
        make();
      });
    });

    function reach() {
      let low = Infinity, high = -Infinity;
      lines.forEach((x, i) => {
        if (!all && !strong.has(i)) return;
        x.values.forEach((v, j) => {
          low = Math.min(low, x.low[j] ?? v, v); high = Math.max(high, x.high[j] ?? v, v);
          // One process's interval may be as wide as the page: it may not set the scale.
          if (x.low[j] !== null && x.low[j] < v * 0.8) low = Math.min(low, v * 0.8);
        });
      });
      if (!(low < Infinity)) return [0, 1];
      const values = lines.flatMap((x, i) => (all || strong.has(i) ? x.values : []));
      low = Math.max(low, Math.min(...values) * 0.85); high = Math.min(high, Math.max(...values) * 1.15);
      if (all) return [low * 0.9, high * 1.1];
      const room = Math.max((high - low) * 0.12, high * 0.02);
      return [Math.max(0, low - room), high + room];
    }

    function stroke(place) {
      if (lines[place].kind === 0) return colour("--accent");
      return strong.has(place) ? colour("--ink") : colour("--faint");
    }

    // A commit, and the day where it is another than that of the tick before.
    function named(x, before) {
      const run = page.runs[used[x]], day = run.created.slice(0, 10), other = page.runs[used[before]];
      return `${run.commit.slice(0, 7)}\n${other && other.created.slice(0, 10) === day ? "" : day}`;
    }

    function under(u) {
      const { ctx } = u, ratio = devicePixelRatio;
      ctx.save();
      ctx.beginPath(); ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); ctx.clip();
      const texts = new Map();
      lines.forEach((line, place) => {
        if (!strong.has(place)) return;
        ctx.fillStyle = stroke(place); ctx.globalAlpha = 0.1;
        for (const [first, last, low, high] of line.bands) {
          const a = u.valToPos(places.get(first) - 0.3, "x", true), b = u.valToPos(places.get(last) + 0.3, "x", true);
          const top = u.valToPos(high, "y", true), bottom = u.valToPos(low, "y", true);
          ctx.fillRect(a, top, b - a, bottom - top);
        }
        for (const [run, what] of line.breaks) texts.set(run, what.map((x) => page.strings[x]));
      });
      ctx.globalAlpha = 1; ctx.strokeStyle = colour("--soft"); ctx.fillStyle = colour("--soft");
      ctx.setLineDash([4 * ratio, 4 * ratio]); ctx.lineWidth = ratio; ctx.textAlign = "left";
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      // A text goes into the first line where it lies on no other; with many breaks only the strokes are left.
      const ends = [];
      for (const [run, what] of [...texts].sort((a, b) => a[0] - b[0])) {
        const x = u.valToPos(places.get(run) - 0.5, "x", true);
        ctx.beginPath(); ctx.moveTo(x, u.bbox.top); ctx.lineTo(x, u.bbox.top + u.bbox.height); ctx.stroke();
        const text = what[0] + (what.length > 1 ? ` and ${what.length - 1} more` : "");
        const wide = ctx.measureText(text).width, last = u.bbox.left + u.bbox.width - wide - 2 * ratio;
        const from = Math.max(u.bbox.left, Math.min(x + 5 * ratio, last));
        const row = [0, 1, 2].find((i) => !(ends[i] > from));
        if (row === undefined) continue;
        ends[row] = from + wide + 8 * ratio;
        const y = u.bbox.top + (12 + 14 * row) * ratio;
        ctx.fillStyle = colour("--paper"); ctx.fillRect(from - 2 * ratio, y - 10 * ratio, wide + 4 * ratio, 13 * ratio);
        ctx.fillStyle = colour("--soft"); ctx.fillText(text, from, y);
      }
      ctx.restore();
    }

    function over(u) {
      const { ctx } = u, ratio = devicePixelRatio;
      ctx.save();
      ctx.beginPath(); ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); ctx.clip();
      lines.forEach((line, place) => {
        if (!strong.has(place)) return;
        ctx.strokeStyle = stroke(place); ctx.globalAlpha = 0.55; ctx.lineWidth = ratio;
        line.runs.forEach((run, i) => {
          if (line.low[i] === null || line.high[i] === null) return;
          const x = u.valToPos(run, "x", true);
          ctx.beginPath(); ctx.moveTo(x, u.valToPos(line.low[i], "y", true));
          ctx.lineTo(x, u.valToPos(line.high[i], "y", true)); ctx.stroke();
        });
        ctx.globalAlpha = 1; ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`; ctx.textAlign = "center";
        for (const [run, change, worse, machine] of line.changes) {
          const at = places.get(run), i = line.runs.indexOf(at);
          if (i < 0) continue;
          ctx.fillStyle = machine ? colour("--soft") : colour(worse ? "--bad" : "--good");
          ctx.strokeStyle = ctx.fillStyle;
          const x = u.valToPos(at - 0.5, "x", true), y = u.valToPos(line.values[i], "y", true);
          ctx.beginPath(); ctx.moveTo(x, y - 14 * ratio); ctx.lineTo(x, y + 14 * ratio); ctx.lineWidth = 2 * ratio; ctx.stroke();
          const above = Math.min(y, u.valToPos(line.values[Math.max(i - 1, 0)], "y", true));
          ctx.fillText(percent(change) + (machine ? " machine" : ""), x, above - (above > u.bbox.top + 30 * ratio ? 18 : -44) * ratio);
        }
      });
      ctx.restore();
      ctx.save();
      ctx.font = `${12 * ratio}px system-ui, sans-serif`; ctx.textAlign = "left"; ctx.textBaseline = "middle";
      let taken = [];
      [...strong].forEach((place) => {
        const line = lines[place], last = line.values.length - 1;
        let y = u.valToPos(line.values[last], "y", true);
        if (y < u.bbox.top - 6 || y > u.bbox.top + u.bbox.height + 6) return;
        while (taken.some((t) => Math.abs(t - y) < 14 * ratio)) y += 14 * ratio;
        taken.push(y);
        ctx.fillStyle = stroke(place);
        ctx.fillText(line.name.length > 20 ? `${line.name.slice(0, 19)}…` : line.name, u.bbox.left + u.bbox.width + 8 * ratio, y);
      });
      ctx.restore();
    }

    function told(place, i) {
      const line = lines[place], run = page.runs[used[line.runs[i]]];
      const at = line.runs[i], change = line.changes.find((x) => places.get(x[0]) === at);
      const broken = line.breaks.find((x) => places.get(x[0]) === at);
      const value = `${number(line.values[i])} ${line.unit === "1" ? "" : line.unit}`;
      readout.replaceChildren(
        `${line.name} ${value}`, half(line.values[i], line.low[i], line.high[i]), " · ",
        `${run.created} · `, element("code", {}, run.commit), ` · ${run.plan}`,
        element("a", { href: `${root}${rowOf(run, line.places[i])}` }, `journal lines ${line.lines[i].join(", ")}`),
        element("a", { href: `${root}run/${run.file}.html` }, "run"),
        element("br"), element("code", {}, `kernelmark repro ${run.file}.jsonl.gz`),
        change ? element("span", { class: change[2] ? "bad" : "good" }, `  change point ${percent(change[1])}${change[3] ? `, ${change[3]}` : ""}`) : "",
        broken ? element("span", { class: "soft" }, `  not comparable with before: ${broken[1].map((x) => page.strings[x]).join("; ")}`) : "",
      );
    }

    function nearest(u) {
      const { left, top } = u.cursor;
      if (left === undefined || left < 0) return;
      let best = null;
      lines.forEach((line, place) => line.runs.forEach((run, i) => {
        const dx = u.valToPos(run, "x") - left, dy = u.valToPos(line.values[i], "y") - top;
        const apart = dx * dx + dy * dy * 0.5 + (strong.has(place) ? 0 : 900);
        if (best === null || apart < best[0]) best = [apart, place, i];
      }));
      if (best) told(best[1], best[2]);
    }

    function make() {
      if (plot) plot.destroy();
      rows.forEach((row, place) => row.classList.toggle("strong", strong.has(place) && lines[place].kind !== 0));
      const [low, high] = reach();
      const few = used.length <= 40;
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const options = {
        width: Math.max(280, figure.clientWidth), height: 260, padding: [14, figure.clientWidth < 560 ? 8 : 150, 0, 0],
        cursor: { points: { show: false }, y: false, drag: { x: false, y: false } },
        legend: { show: false },
        scales: { x: { time: false, range: [-0.6, used.length - 0.4] }, y: { range: [low, high], distr: all ? 3 : 1 } },
        axes: [
          { ...axis, grid: { show: false }, space: 78, size: 46, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
            values: (u, at) => at.map((x, i) => (page.runs[used[x]] ? named(x, i ? at[i - 1] : undefined) : "")) },
          { ...axis, size: 64, values: (u, at) => at.map((x) => (x === null ? null : x.toLocaleString("en", { maximumSignificantDigits: 4 }))) },
        ],
        series: [{}, ...series.map((x) => ({
          label: x.line.name, stroke: stroke(x.place), width: lines[x.place].kind === 0 ? 2 : strong.has(x.place) ? 1.5 : 1,
          alpha: strong.has(x.place) ? 1 : 0.55, spanGaps: true,
          points: { show: few || x.values.filter((y) => y !== undefined).length === 1, size: strong.has(x.place) ? 6 : 4, fill: stroke(x.place), width: 0 },
        }))],
        hooks: {
          drawClear: [under], draw: [over],
          setCursor: [(u) => { if (pinned === null) nearest(u); }],
          ready: [(u) => u.over.addEventListener("click", () => { pinned = pinned === null ? true : null; nearest(u); })],
        },
      };
      plot = new uPlot(options, [used.map((_, i) => i), ...series.map((x) => x.values)], holder);
    }

    make();
    const first = [...strong][0] ?? 0;
    told(first, lines[first].values.length - 1);
    dark.addEventListener("change", make);
    let width = figure.clientWidth;
    new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== width) { width = figure.clientWidth; make(); } }).observe(figure);
  }

  function operator() {
    const page = JSON.parse(document.getElementById("data").textContent);
    document.querySelectorAll("details[data-chart]").forEach((details) => {
      let drawn = false;
      const show = () => {
        if (!details.open || drawn) return;
        drawn = true;
        const figure = element("figure", { class: "chart" });
        details.lastElementChild.before(figure);
        draw(figure, page, page.charts[Number(details.dataset.chart) - page.first], details.querySelector("table"), details.dataset.beside);
      };
      details.addEventListener("toggle", show);
      show();
    });
    filter();
    const wanted = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (wanted && wanted.tagName === "DETAILS") { wanted.open = true; wanted.scrollIntoView(); }
  }

  function filter() {
    const box = document.querySelector(".filter"), input = box.querySelector("input"), told = box.querySelector("span");
    const cases = [...document.querySelectorAll(".cases details")];
    const text = (x) => `${x.firstElementChild.title} ${x.id}`.toLowerCase();
    if (cases.length < 8) return;
    box.hidden = false;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      cases.forEach((x) => {
        x.hidden = !words.every((w) => text(x).includes(w));
        shown += !x.hidden;
      });
      document.querySelectorAll(".cases").forEach((x) => {
        const none = !x.querySelector("details:not([hidden])");
        x.hidden = none; x.previousElementSibling.hidden = none;
      });
      told.textContent = words.length ? `${shown} of ${cases.length} cases` : "";
    });
  }

  function overview() {
    document.querySelectorAll(".find").forEach((box) => {
      const input = box.querySelector("input"), table = box.nextElementSibling;
      box.hidden = false;
      input.addEventListener("input", () => {
        const word = input.value.trim().toLowerCase();
        table.querySelectorAll("tbody").forEach((family) => {
          const rows = [...family.querySelectorAll("tr:not(.family)")];
          rows.forEach((x) => { x.hidden = !x.cells[0].textContent.toLowerCase().includes(word); });
          family.hidden = rows.every((x) => x.hidden);
        });
      });
    });
  }

  // Comparisons -----------------------------------------------------------------------------------------------

  function load(file) {
    return new Promise((done, failed) => {
      const script = element("script", { src: `data/${file}.js` });
      waiting.set("next", null);
      script.addEventListener("load", () => done(waiting.get("next")));
      script.addEventListener("error", () => failed(new Error(`data/${file}.js is not there`)));
      document.head.append(script);
    });
  }

  // What `data.values` wrote: texts by their places, then numbers.
  function unpack(given) {
    const row = (x) => {
      const [operator, name, cache, implementation, unit, better, key, spec, version, timer] = x.slice(0, 10).map((y) => given.strings[y]);
      const [kind, value, low, high, run, place] = x.slice(10);
      return { operator, name, cache, implementation, unit, better, key, spec, version, timer, kind, value, low, high, run: given.runs[run], order: run, place };
    };
    return Object.assign(given.rows.map(row), { beside: given.beside.map(row) });
  }

  function compare() {
    const { sources, first, beside } = JSON.parse(document.getElementById("data").textContent);
    const form = document.getElementById("compare"), result = document.getElementById("result");
    const cache = new Map();
    const field = (name) => form.elements[name];
    const label = (x) => `${x.created} · ${x.commit} · ${x.plan} · ${counted(x.rows)} · ${x.device}`;
    const OTHERS = "the best other of each case", OURS = "kernelmark";
    if (!sources.length) return;
    form.hidden = false;
    for (const side of ["A", "B"]) {
      sources.forEach((x, i) => field(`source${side}`).append(element("option", { value: i }, label(x))));
    }
    const asked = new URLSearchParams(location.hash.slice(1));
    ["A", "B"].forEach((side, i) => {
      const place = sources.findIndex((x) => x.file === (asked.get(side.toLowerCase()) || first[i]));
      field(`source${side}`).value = String(place < 0 ? sources.length - 1 : place);
    });
    const get = async (i) => {
      if (!cache.has(i)) cache.set(i, unpack(await load(sources[i].file)));
      return cache.get(i);
    };
    // What was chosen or asked for, else ours: the name of most of our rows where none of them is called so.
    const choose = (select, rows, names, wanted) => {
      const before = select.value || wanted, own = new Map();
      rows.forEach((x) => { if (x.kind === 0) own.set(x.implementation, (own.get(x.implementation) || 0) + 1); });
      const most = [...own].sort((x, y) => y[1] - x[1])[0];
      select.replaceChildren(...names.map((x) => element("option", { value: x }, x)));
      const found = [before, OURS, most && most[0]].find((x) => names.includes(x));
      if (found) select.value = found;
    };
    // Rows of the fastest other of each case, in the place of an implementation.
    const others = (rows) => {
      const best = new Map();
      rows.filter((x) => x.kind === 1).forEach((x) => {
        const key = `${x.operator}\n${x.name}\n${x.cache}`, known = best.get(key);
        if (!known || (x.better === "higher" ? x.value > known.value : x.value < known.value)) best.set(key, x);
      });
      return [...best.values()];
    };
    // Ours of a name and the best other, both of the newest run that has the two of a case: no two runs are paired.
    const within = (rows, name) => {
      const cases = new Map();
      [...rows, ...rows.beside].forEach((x) => {
        const key = `${x.operator}\n${x.name}\n${x.cache}`;
        cases.set(key, [...(cases.get(key) || []), x]);
      });
      return [...cases.values()].map((found) => {
        const ours = found.filter((x) => x.kind === 0 && x.implementation === name && found.some((y) => y.kind === 1 && y.run === x.run))
          .sort((x, y) => y.order - x.order)[0];
        return ours && [ours, others(found.filter((x) => x.run === ours.run))[0]];
      }).filter(Boolean);
    };
    const named = (rows, name) => (name === OTHERS ? others(rows) : rows.filter((x) => x.implementation === name));
    async function show() {
      const [i, j] = [Number(field("sourceA").value), Number(field("sourceB").value)];
      try {
        const [a, b] = [await get(i), await get(j)];
        const names = (rows) => [OTHERS, ...new Set(rows.map((x) => x.implementation))].sort();
        choose(field("nameA"), a, names(a), asked.get("m"));
        choose(field("nameB"), b, names(b), asked.get("n"));
        const operators = [...new Set(b.map((x) => x.operator))].sort();
        choose(field("operator"), [], ["all operators", ...operators], asked.get("o") || "all operators");
        table(sources[i], sources[j], a, b);
        history.replaceState(null, "", `#${new URLSearchParams({ a: sources[i].file, b: sources[j].file, m: field("nameA").value, n: field("nameB").value, o: field("operator").value })}`);
      } catch (error) {
        result.replaceChildren(element("p", { class: "bad" }, error.message));
      }
    }
    function table(first, second, a, b) {
      const [m, n, operator] = [field("nameA").value, field("nameB").value, field("operator").value];
      const known = new Map(named(a, m).map((x) => [`${x.operator}\n${x.name}\n${x.cache}`, x]));
      const mine = m === OTHERS ? n : m;
      const once = first === second && (m === OTHERS) !== (n === OTHERS) && a.some((x) => x.kind === 0 && x.implementation === mine);
      const every = once ? within(a, mine).map(([ours, other]) => (m === OTHERS ? [other, ours] : [ours, other]))
        : named(b, n).map((x) => [known.get(`${x.operator}\n${x.name}\n${x.cache}`), x]).filter(([x]) => x);
      const pairs = every.filter(([, x]) => operator === "all operators" || x.operator === operator);
      const apart = new Map();
      const across = first.device !== second.device;
      const compared = pairs.map(([x, y]) => {
        // The code and, where two devices were chosen, the device's conditions are what is compared.
        const differs = x.spec !== y.spec ? ["case definition"] : x.key === y.key || across ? [] : keyed(x, y);
        differs.forEach((z) => apart.set(z, (apart.get(z) || 0) + 1));
        const ratio = differs.length || x.value <= 0 ? null : y.value / x.value;
        const ends = ratio && [x, y].every((z) => z.low > 0 && z.high !== null) ? [y.low / x.high, y.high / x.low] : null;
        const clear = ends && (ends[0] > 1 || ends[1] < 1);
        const sense = clear ? ((ratio > 1) === (y.better === "lower") ? "bad" : "good") : "soft";
        // How many times better, and its interval.
        const gain = ratio && (y.better === "higher" ? [ratio, ends] : [1 / ratio, ends && [1 / ends[1], 1 / ends[0]]]);
        return { ratio, ends, sense, gain, row: () => line(x, y, ratio, ends, differs, sense, m === OTHERS, n === OTHERS) };
      });
      // What lies apart by its intervals first, the largest change at the top; of one process, then without a ratio last.
      const rank = (z) => (z.ends ? Number(z.sense === "soft") : z.ratio ? 2 : 3);
      compared.sort((p, q) => rank(p) - rank(q) || Math.abs(Math.log(q.ratio || 1)) - Math.abs(Math.log(p.ratio || 1)));
      const rows = compared.map((z) => z.row());
      const gains = compared.filter((z) => z.ratio), certain = gains.filter((z) => z.ends), single = gains.length - certain.length;
      const better = certain.filter((z) => z.sense === "good").length, worse = certain.filter((z) => z.sense === "bad").length;
      result.replaceChildren(
        element("h3", {}, gains.length ? headline(gains, certain) : pairs.length ? "No row of the two can be compared" : "The two have no case in common"),
        gains.length ? element("p", { class: "outcomes" },
          ...(certain.length ? [element("span", { class: "good" }, `${better} better`), element("span", { class: "bad" }, `${worse} worse`),
            element("span", { class: "soft" }, `${certain.length - better - worse} within their intervals`)] : []),
          single ? element("span", { class: "soft" }, `${single} of one process: not decided`) : null) : "",
        across ? element("p", { class: "note" }, `Across devices: ${differing(a[0].run, b[0].run).join("; ")}`) : "",
        apart.size ? element("p", { class: "note" }, `Without a ratio: ${[...apart].map(([x, c]) => `${counted(c)}, ${x}`).join("; ")}`) : "",
        pairs.length ? element("div", { class: "scroll" }, element("table", { class: "changes cards", role: "table" },
          element("thead", { role: "rowgroup" }, element("tr", { role: "row" },
            ...["Case", "A", "± 95 %", "B", "± 95 %", "B ÷ A", "at the intervals' ends", "Change"].map((x) => element("th", { role: "columnheader", scope: "col" }, x)))),
          element("tbody", { role: "rowgroup" }, ...rows))) : "",
      );
      document.getElementById("static").hidden = true;
    }
    // The mean is of the rows that have an interval, of all where none has. Only one whose interval leaves out 1 names
    // who is better: the mean of the rows' bounds holds however much their errors move together.
    function headline(gains, certain) {
      const meant = certain.length ? certain : gains;
      const mean = (of) => Math.exp(meant.reduce((s, z) => s + Math.log(of(z.gain)), 0) / meant.length);
      const value = mean((x) => x[0]), [low, high] = certain.length ? [mean((x) => x[1][0]), mean((x) => x[1][1])] : [0, Infinity];
      const told = (x, a, b) => `${x.toFixed(3)}×${certain.length ? ` [${a.toFixed(3)}, ${b.toFixed(3)}]` : ""}`;
      const of = `geometric mean of ${meant.length < gains.length ? `${meant.length} of ` : ""}${counted(gains.length)}`;
      if (low > 1) return `B is better by ${told(value, low, high)}, ${of}`;
      if (high < 1) return `B is worse by ${told(1 / value, 1 / high, 1 / low)}, ${of}`;
      return `${certain.length ? "Undecided" : "Nothing is decided"}: ${told(value, low, high)}, ${of}; above 1 B is better`;
    }
    function line(x, y, ratio, ends, differs, sense, ...who) {
      const value = (z) => element("a", { href: rowOf(z.run, z.place) }, `${number(z.value)} ${z.unit === "1" ? "" : z.unit}`);
      const link = (z) => (who[z === x ? 0 : 1] ? element("span", {}, value(z), element("span", { class: "soft" }, ` ${z.implementation}`)) : value(z));
      const cell = (label, kind, ...text) => element("td", { role: "cell", class: kind, "data-l": label }, ...text);
      return element("tr", { role: "row" },
        element("th", { role: "rowheader", scope: "row" }, element("b", {}, y.operator), ` ${y.name}`, y.cache === "cold" ? "" : ` (${y.cache})`),
        cell("A", "", link(x)), cell("A, ± 95 %", "soft", half(x.value, x.low, x.high)),
        cell("B", "", link(y)), cell("B, ± 95 %", "soft", half(y.value, y.low, y.high)),
        ...(ratio ? [cell("B ÷ A", "", ratio.toFixed(3)),
          cell("at the intervals' ends", "soft", ends ? ends.map((z) => z.toFixed(3)).join(" to ") : ""),
          cell("Change", sense, percent(ratio - 1))]
          : [element("td", { role: "cell", class: "soft why", colspan: 3 }, `not comparable: ${differs.join("; ") || "a value of 0"}`)]));
    }
    function differing(a, b) {
      const names = [...new Set([...Object.keys(a.conditions), ...Object.keys(b.conditions)])].sort();
      return names.filter((x) => a.conditions[x] !== b.conditions[x])
        .map((x) => `${x}: ${a.conditions[x] ?? "not recorded"} → ${b.conditions[x] ?? "not recorded"}`);
    }
    // What a row's key is made of. Of two libraries the versions are part of what was chosen.
    function keyed(x, y) {
      const out = differing(x.run, y.run);
      if (!out.length && x.run.key !== y.run.key) out.push("comparability key");
      if (x.timer !== y.timer) out.push(`timer: ${x.timer} → ${y.timer}`);
      if (x.implementation === y.implementation && x.version !== y.version) out.push(`version: ${x.version} → ${y.version}`);
      return out;
    }
    const preset = (files, m, n) => {
      ["A", "B"].forEach((side, i) => { field(`source${side}`).value = String(sources.findIndex((x) => x.file === files[i])); });
      [["nameA", m], ["nameB", n], ["operator", "all operators"]].forEach(([name, value]) => {
        field(name).replaceChildren(element("option", { value }, value));  // `choose` keeps what is chosen
        field(name).value = value;
      });
      show();
    };
    const [newest, against] = ["newest", "others"].map((x) => form.querySelector(`button[name=${x}]`));
    newest.hidden = !first[0]; against.hidden = !beside;
    newest.addEventListener("click", () => preset(first, OURS, OURS));
    against.addEventListener("click", () => preset([beside, beside], OTHERS, OURS));
    form.addEventListener("change", show);
    show();
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.body.classList.add("script");
    if (document.body.classList.contains("operator")) operator();
    if (document.body.classList.contains("overview")) overview();
    if (document.body.classList.contains("compare")) compare();
  });

  return { take: (given) => waiting.set("next", given) };
})();
