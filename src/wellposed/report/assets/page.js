(function () {
  "use strict";
  // The data of the page: each section has its rows by column, a Vega-Lite chart without data, or both.
  const sections = JSON.parse(document.getElementById("report-data").textContent);
  const TABLE_ROWS = 300;
  const NARROW = 560;
  const LOG_AXIS = { format: "~e", tickCount: 6, labelOverlap: true, labelExpr: "replace(datum.label, '+', '')" };
  const byId = (id) => document.getElementById(id);
  const drawn = [];

  function make(tag, text, attributes) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return element;
  }

  function isolated(text) {
    return make("bdi", text);
  }

  function rowsOf(chart) {
    const filled = new Map(chart.columns.filter((c) => !c.log_of).map((c) => [c.key, valuesOf(c)]));
    for (const c of chart.columns) if (c.log_of) filled.set(c.key, filled.get(c.log_of).map(Math.log));
    const keys = chart.columns.map((column) => column.key);
    const count = keys.length ? filled.get(keys[0]).length : 0;
    return Array.from({ length: count }, (_, i) => Object.fromEntries(keys.map((key) => [key, filled.get(key)[i]])));
  }

  function valuesOf(column) {
    // Equal values in a row are stored once, with how many rows they take.
    const values = column.repeats ? column.values.flatMap((value, i) => Array(column.repeats[i]).fill(value)) : column.values;
    return column.levels ? values.map((code) => column.levels[code]) : values;
  }

  function shown(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3).replace("e+", "e") : String(+value.toPrecision(5));
  }

  function brief(value) {
    return value >= 1e5 ? value.toExponential(2).replace("e+", "e") : value.toLocaleString("en", { maximumSignificantDigits: 3 });
  }

  // Light and dark

  function theme() {
    const chosen = document.documentElement.dataset.theme;
    return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue("--" + name).trim();
    return { page: of("page"), line: of("line"), text: of("text"), quiet: of("quiet") };
  }

  function config() {
    const { page, line, text, quiet } = colours();
    const dark = theme() === "dark";
    // After Okabe and Ito, for all kinds of colour vision.
    const category = dark
      ? ["#56b4e9", "#f0884a", "#2fc99a", "#e29ac6", "#f0c244", "#a9c7ff", "#c9cdd6"]
      : ["#0072b2", "#c04f00", "#007f5f", "#a6417a", "#8f6a00", "#3d7fbf", "#555b66"];
    return {
      background: page,
      font: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
      view: { stroke: line },
      axis: { labelColor: text, titleColor: quiet, domainColor: quiet, tickColor: quiet, gridColor: line,
        gridOpacity: 0.5, labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal" },
      axisBand: { grid: false },
      legend: { labelColor: text, titleColor: quiet, orient: "top", titleFontWeight: "normal" },
      title: { color: text, fontWeight: 600 },
      header: { labelColor: text },
      range: { category, heatmap: { scheme: dark ? "inferno" : "yelloworangered", extent: dark ? [0.18, 1] : [0.05, 1] },
        ramp: { scheme: dark ? "viridis" : "blues" }, verdict: [category[1], quiet, category[0]],
        bound: dark ? ["#ffffff", "#000000"] : ["#000000", "#ffffff"] },
      line: { color: category[0] },
      style: { picked: { stroke: dark ? "#7cb7ff" : "#0b4fa8" }, mean: { color: category[0] }, zero: { color: quiet } },
    };
  }

  // Charts

  const tip = make("div", null, { class: "tip", "aria-hidden": "true", hidden: "" });
  document.body.append(tip);

  function tooltip(handler, event, item, value) {
    tip.hidden = !value;
    if (!value) return;
    const list = make("dl");
    for (const [name, entry] of Object.entries(value)) {
      if (entry === "null" || entry === "undefined" || entry === null) continue; // how Vega-Lite writes nothing
      const title = make("dt", name.replaceAll("_", " "));
      const text = make("dd");
      text.append(isolated(shown(typeof entry === "string" && entry !== "" && !isNaN(+entry) ? +entry : entry)));
      list.append(title, text);
    }
    tip.replaceChildren(list);
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const y = event.clientY + 16 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = y + "px";
  }

  const distinct = (rows, key) => [...new Set(rows.map((row) => row[key]))];

  // Of each cell the median over a variant's runs. It is exact if every lower bound lies above it.
  function medians(rows, [value, ...keys]) {
    const cells = new Map();
    for (const row of rows) {
      const key = JSON.stringify(keys.map((name) => row[name]));
      if (cells.has(key)) cells.get(key).push(row);
      else cells.set(key, [row]);
    }
    return [...cells.values()].map((own) => {
      if (own.length === 1) return own[0];
      own.sort((a, b) => a[value] - b[value]);
      const [low, high] = [own[(own.length - 1) >> 1], own[own.length >> 1]];
      const isBound = own.some((row) => row.status === "at least" && row[value] <= high[value]);
      const cell = { ...high, runs: own.length, low: null, high: null, status: isBound ? "at least" : "ok" };
      if (low !== high) {
        if ("ln_kappa" in cell) cell.ln_kappa = (low.ln_kappa + high.ln_kappa) / 2;
        cell[value] = "ln_kappa" in cell ? Math.exp(cell.ln_kappa) : (low[value] + high[value]) / 2;
      }
      return cell;
    });
  }

  // A chart as wide as the page: panels next to each other where there is room, below each other on a phone.
  function fitted(figure, width, rows) {
    let spec = structuredClone(figure.spec);
    const legend = { columns: Math.max(1, Math.floor(width / 240)), labelLimit: width < 500 ? width - 80 : 320 };
    const labels = Math.round(Math.min(230, width * 0.36));
    const axisY = { labelLimit: spec.hconcat ? labels : Math.max(110, width * 0.38) };
    const panels = figure.facet ? distinct(rows, figure.facet) : [];
    if (panels.length > 1) {
      const columns = Math.min(panels.length, Math.max(1, Math.floor(width / 280)));
      Object.assign(axisY, { minExtent: 34, maxExtent: 34 });
      const facet = { field: figure.facet, type: "nominal", title: null, sort: panels,
        header: { labelFontSize: 12, labelFontWeight: 600, labelLimit: Math.floor(width / columns) - 40, labelPadding: 6 } };
      spec.width = Math.floor(width / columns) - 84;
      spec = { facet, columns, spacing: 14, resolve: { axis: { x: "independent", y: "independent" } }, spec };
    } else if (spec.vconcat) {
      spec.vconcat.forEach((part) => { part.width = width - 66; });
    } else if (spec.hconcat) {
      Object.assign(axisY, { minExtent: labels, maxExtent: labels });
      const [left, right] = spec.hconcat;
      for (const part of spec.hconcat) part.encoding.y.scale = { domain: distinct(rows.filter((row) => row.accuracy !== null), "name") };
      if (width < NARROW) {
        left.width = right.width = width - labels - 30;
        spec = { vconcat: [left, right], spacing: spec.spacing };
      } else {
        left.width = right.width = Math.floor((width - labels - 70) / 2);
        right.encoding.y.axis = null;
      }
    } else {
      Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
    }
    spec.params = [{ name: "picked", value: figure.picked || "" }];
    spec.config = vega.mergeConfig(config(), { legend, axisY, view: { continuousWidth: 200 } });
    return spec;
  }

  async function draw(figure) {
    const width = figure.host.closest("details:not([open])") ? 0 : figure.host.clientWidth;
    figure.width = width;
    if (!width) return;
    const rows = figure.rows();
    const spec = fitted(figure, width, rows);
    spec.data = { name: "rows" };
    spec.datasets = { rows };
    const compiled = vegaLite.compile(spec, { logger: quietLogger }).spec;
    const runtime = vega.parse(compiled, null, { ast: true });
    if (figure.view) figure.view.finalize();
    const view = new vega.View(runtime, { renderer: "svg", expr: vegaInterpreter.expressionInterpreter, loader: nothing });
    figure.view = view;
    view.tooltip(tooltip).initialize(figure.host);
    if (figure.click) view.addEventListener("click", (event, item) => { if (item && item.datum) figure.click(item.datum); });
    await view.runAsync();
  }

  const quietLogger = { level: () => quietLogger, warn: () => quietLogger, info: () => quietLogger,
    debug: () => quietLogger, error: (...parts) => { console.error(...parts); return quietLogger; } };
  const refuse = () => Promise.reject(new Error("this page loads nothing"));
  const nothing = { load: refuse, sanitize: refuse, http: refuse, file: refuse };

  function add(figure) {
    drawn.push(figure);
    return figure;
  }

  function drawAll() {
    return Promise.all(drawn.map(draw));
  }

  function drawChanged() {
    drawn.filter((figure) => figure.host.clientWidth !== figure.width).forEach(draw);
  }

  // Saving

  function save(name, kind, content) {
    const link = make("a", null, { download: name, href: URL.createObjectURL(new Blob([content], { type: kind })) });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function csv(columns, rows) {
    const cell = (value) => {
      if (value === null || value === undefined) return "";
      // A spreadsheet would run a name that begins like a formula.
      const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
      return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    const lines = [columns.map((c) => cell(c.title)), ...rows.map((row) => columns.map((c) => cell(row[c.key])))];
    return lines.map((line) => line.join(",")).join("\r\n") + "\r\n";
  }

  function saveButtons(buttons, name, figure, table) {
    for (const button of buttons) {
      button.addEventListener("click", async () => {
        const kind = button.dataset.save;
        if (kind === "CSV") save(name + ".csv", "text/csv;charset=utf-8", csv(table().columns, table().rows));
        else if (kind === "SVG") save(name + ".svg", "image/svg+xml", await figure.view.toSVG());
        else (await figure.view.toCanvas(2)).toBlob((blob) => save(name + ".png", "image/png", blob));
      });
    }
  }

  // Tables

  function table(host, title, columns, rows) {
    let sorted = rows;
    let by = null;
    let limit = TABLE_ROWS;
    const element = make("table");
    const caption = make("caption", title + ". The buttons in the head sort.");
    const head = make("thead");
    const body = make("tbody");
    const more = make("button", null, { type: "button", class: "more" });
    const numeric = new Set(columns.filter((c) => rows.every((row) => typeof row[c.key] !== "string")).map((c) => c.key));
    const line = make("tr");
    for (const column of columns) {
      const cell = make("th", null, { scope: "col", "aria-sort": "none" });
      if (numeric.has(column.key)) cell.className = "number";
      const button = make("button", column.title, { type: "button" });
      button.addEventListener("click", () => sort(column, cell, button));
      cell.append(button);
      line.append(cell);
    }
    head.append(line);
    element.append(caption, head, body);
    host.append(element, more);
    more.addEventListener("click", () => { limit += 2000; fill(); });
    fill();

    function sort(column, cell, button) {
      const down = by === column.key && cell.getAttribute("aria-sort") === "ascending";
      by = column.key;
      for (const other of line.children) {
        other.setAttribute("aria-sort", "none");
        other.firstChild.textContent = other.firstChild.textContent.replace(/ [▲▼]$/, "");
      }
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      button.textContent += down ? " ▼" : " ▲";
      const sign = down ? -1 : 1;
      sorted = [...rows].sort((a, b) => {
        const [x, y] = [a[column.key], b[column.key]];
        if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
        return sign * (typeof x === "number" && typeof y === "number" ? x - y
          : String(x).localeCompare(String(y), "en", { numeric: true }));
      });
      fill();
    }

    function fill() {
      body.replaceChildren(...sorted.slice(0, limit).map((row) => {
        const tr = make("tr");
        for (const column of columns) {
          const text = shown(row[column.key]);
          const cell = make("td");
          if (numeric.has(column.key)) cell.className = "number";
          else if (text.length > 30) cell.className = "long";
          if (typeof row[column.key] === "number") { cell.textContent = text; cell.title = String(row[column.key]); }
          else cell.append(isolated(text));
          tr.append(cell);
        }
        return tr;
      }));
      const left = sorted.length - limit;
      more.hidden = left <= 0;
      more.textContent = "Show more (" + left + " rows left; the CSV file has all)";
    }
  }

  function menu(select, values) {
    select.replaceChildren(...values.map((value, i) => make("option", value, { value: String(i), dir: "auto" })));
  }

  // The spectrum that a click opens

  function spectrumPanel(section, rows, heat) {
    const curves = section.extra.spectra;
    const select = byId(section.id + "-place");
    const said = byId(section.id + "-said");
    const known = rows.filter((row) => row.spectrum !== null);
    const keys = [...new Map(known.map((row) => [row.block + "|" + row.position, [row.block, row.position]])).values()];
    menu(select, keys.map(([block, position]) => "block " + block + ", " + position));
    let place = null;
    const points = () => !place ? [] : known
      .filter((row) => row.block === place.block && row.position === place.position)
      .flatMap((row) => curves[row.spectrum].index.map((index, i) =>
        ({ variant: row.variant, run: row.run, index, value: curves[row.spectrum].value[i] })));
    const figure = add({
      host: byId(section.id + "-spectrum-chart"),
      rows: points,
      spec: {
        height: 220,
        transform: [{ filter: { field: "value", gt: 0 } }],
        mark: { type: "line", strokeWidth: 2, point: { size: 16 } },
        encoding: {
          x: { field: "index", type: "quantitative", title: "number of the singular value, the largest first",
            axis: { tickMinStep: 1, format: "d" } },
          y: { field: "value", type: "quantitative", title: "singular value / largest", scale: { type: "log" },
            axis: LOG_AXIS },
          color: { field: "variant", type: "nominal", title: null, sort: null },
          detail: { field: "run" },
          tooltip: [{ field: "variant" }, { field: "run" }, { field: "index" }, { field: "value" }],
        },
      },
    });
    function choose(block, position, redraw) {
      place = { block, position };
      heat.picked = block + "|" + position;
      const here = keys.findIndex(([b, p]) => b === block && p === position);
      if (here >= 0) select.value = String(here);
      said.replaceChildren("block " + block + ", " + position + ": kappa ");
      const cells = medians(rows.filter((row) => row.block === block && row.position === position), heat.median);
      cells.slice(0, 6).forEach((row, i) => {
        said.append((i ? "; " : "") + (row.status === "at least" ? "≥ " : "") + brief(row.kappa) + " in ", isolated(row.variant));
      });
      if (here < 0) said.append(". Its records have no spectrum; wellposed diagnose writes one.");
      if (!redraw) return;
      draw(figure);
      if (heat.view) heat.view.signal("picked", heat.picked).runAsync();
    }
    heat.click = (datum) => {
      if (datum.block === undefined) return;
      choose(datum.block, datum.position, true);
      byId(section.id + "-spectrum").scrollIntoView({ block: "nearest" });
    };
    select.addEventListener("change", () => { const [b, p] = keys[+select.value]; choose(b, p, true); });
    const worst = medians(known, heat.median).reduce((a, b) => (b.kappa > a.kappa ? b : a), { kappa: 0 });
    if (worst.kappa) choose(worst.block, worst.position, false);
    const columns = ["variant", "run", "index", "value"].map((key) => ({ key, title: key }));
    saveButtons(document.querySelectorAll("#" + section.id + "-spectrum [data-save]"), "spectrum", figure,
      () => ({ columns, rows: points() }));
  }

  function pictures(section) {
    const host = byId(section.id + "-pictures");
    for (const picture of section.extra.pictures) {
      const strip = make("div", null, { class: "strip", role: "group" });
      for (const step of picture.steps) {
        const figure = make("figure");
        const image = make("img", null, { src: step.src, alt: picture.name + ", " + step.label });
        const caption = make("figcaption");
        caption.append(isolated(step.label));
        figure.append(image, caption);
        strip.append(figure);
      }
      host.append(strip);
    }
  }

  function set(section) {
    const chart = section.chart;
    const rows = rowsOf(chart);
    const columns = chart.columns.filter((column) => !column.hidden);
    let figure = null;
    if (chart.spec) {
      const cells = chart.median.length ? medians(rows, chart.median) : rows;
      const [by, most] = chart.most;
      const values = by ? distinct(cells, by) : [];
      const first = new Set(values.slice(0, most));
      figure = add({ host: byId(section.id + "-chart"), spec: chart.spec, facet: chart.facet, median: chart.median,
        rows: () => (by && !figure.all ? cells.filter((row) => first.has(row[by])) : cells) });
      if (values.length > most) {
        const more = make("button", "Show all " + values.length, { type: "button" });
        more.addEventListener("click", () => { figure.all = true; more.remove(); draw(figure); });
        document.querySelector("#" + section.id + " > .tools").prepend(more);
      }
    }
    if (section.extra && section.extra.pictures) pictures(section);
    if (chart.opens === "spectrum") spectrumPanel(section, rows, figure);
    const outside = [...document.querySelectorAll("#" + section.id + " [data-save]")].filter((b) => !b.dataset.of);
    saveButtons(outside, section.id, figure, () => ({ columns, rows }));
    const host = byId(section.id + "-table");
    const details = host.closest("details");
    const fill = () => { if (!host.firstChild) table(host, section.title, columns, rows); };
    if (details.open) fill();
    details.addEventListener("toggle", fill);
  }

  sections.forEach(set);
  for (const part of document.querySelectorAll("details.part")) part.addEventListener("toggle", drawChanged);

  const button = byId("theme");
  function named() {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(theme() === "dark"));
    button.setAttribute("aria-label", "Switch to " + (theme() === "dark" ? "light" : "dark") + " colours");
  }
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    named();
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { named(); drawAll(); });
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawChanged, 150);
  });
  named();
  drawAll().then(() => { document.documentElement.dataset.ready = "yes"; });
})();
