(function () {
  "use strict";
  // The data of the page: each section has its rows by column, a Vega-Lite chart without data, or both.
  const sections = JSON.parse(document.getElementById("report-data").textContent);
  const TABLE_ROWS = 300;
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
    const category = dark
      ? ["#7cb7ff", "#ffb454", "#7fd1ae", "#ff8a8a", "#c9a3ff", "#f2d45c", "#6fd3e8", "#f59ac9", "#b8c4d6", "#a8d46f"]
      : ["#1f5fb4", "#c05a00", "#1b7f5c", "#b3261e", "#6b3fa0", "#8a6d00", "#0b7285", "#a61e63", "#545d6e", "#4d7c0f"];
    return {
      background: page,
      font: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
      view: { stroke: line },
      axis: { labelColor: text, titleColor: quiet, domainColor: quiet, tickColor: quiet, gridColor: line,
        gridOpacity: 0.5, labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal" },
      axisBand: { grid: false },
      legend: { labelColor: text, titleColor: quiet, orient: "top", titleFontWeight: "normal" },
      title: { color: text, fontWeight: 600 },
      range: { category, heatmap: { scheme: dark ? "inferno" : "yelloworangered", extent: dark ? [0.18, 1] : [0.05, 1] },
        ramp: { scheme: dark ? "viridis" : "blues" } },
      line: { color: category[0] },
      style: { picked: { stroke: dark ? "#7cb7ff" : "#0b4fa8" } },
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

  function fitted(spec, width) {
    const copy = structuredClone(spec);
    // A legend of many names goes on in a further row.
    const legend = { columns: Math.max(1, Math.floor(width / 240)), labelLimit: width < 500 ? width - 80 : 320 };
    copy.config = vega.mergeConfig(config(), { legend, axisY: { labelLimit: Math.max(110, width * 0.38) } });
    if (copy.vconcat) copy.vconcat.forEach((part) => { part.width = width - 66; });
    else Object.assign(copy, { width, autosize: { type: "fit-x", contains: "padding" } });
    return copy;
  }

  async function draw(figure) {
    const width = figure.host.clientWidth;
    if (!width) return;
    figure.width = width;
    const spec = fitted(figure.spec, width);
    spec.datasets = { rows: figure.rows(), picked: figure.picked ? figure.picked() : [] };
    spec.data = { name: "rows" };
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
        ({ run: row.run, index, value: curves[row.spectrum].value[i] })));
    const figure = add({
      host: byId(section.id + "-spectrum-chart"),
      rows: points,
      spec: {
        height: 220,
        transform: [{ filter: { field: "value", gt: 0 } }],
        mark: { type: "line", strokeWidth: 2, point: { size: 16 } },
        encoding: {
          x: { field: "index", type: "quantitative", title: "number of the singular value, the largest first", axis: { tickMinStep: 1 } },
          y: { field: "value", type: "quantitative", title: "singular value / largest", scale: { type: "log" },
            axis: LOG_AXIS },
          color: { field: "run", type: "nominal", title: null, sort: null },
          tooltip: [{ field: "run" }, { field: "index" }, { field: "value" }],
        },
      },
    });
    function choose(block, position, redraw) {
      place = { block, position };
      const here = keys.findIndex(([b, p]) => b === block && p === position);
      if (here >= 0) select.value = String(here);
      const here_rows = rows.filter((row) => row.block === block && row.position === position);
      said.replaceChildren("block " + block + ", " + position + ": kappa ");
      here_rows.slice(0, 6).forEach((row, i) => {
        said.append((i ? "; " : "") + (row.status === "at least" ? "≥ " : "") + shown(row.kappa) + " in ", isolated(row.run));
      });
      if (here < 0) said.append(". Its records have no spectrum; wellposed diagnose writes one.");
      if (!redraw) return;
      draw(figure);
      draw(heat);
    }
    heat.picked = () => (place ? [{ block: place.block, position: place.position }] : []);
    heat.click = (datum) => {
      if (datum.block === undefined) return;
      choose(datum.block, datum.position, true);
      byId(section.id + "-spectrum").scrollIntoView({ block: "nearest" });
    };
    select.addEventListener("change", () => { const [b, p] = keys[+select.value]; choose(b, p, true); });
    const worst = known.reduce((a, b) => (b.kappa > a.kappa ? b : a), known[0]);
    if (worst) choose(worst.block, worst.position, false);
    const columns = ["run", "index", "value"].map((key) => ({ key, title: key }));
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
    const select = byId(section.id + "-choose");
    const values = chart.choose ? [...new Set(rows.map((row) => row[chart.choose]))] : [];
    let figure = null;
    if (select) {
      menu(select, values);
      select.value = String(Math.max(0, values.indexOf(chart.chosen)));
    }
    if (chart.spec) {
      const chosen = () => (select ? rows.filter((row) => row[chart.choose] === values[+select.value]) : rows);
      figure = add({ host: byId(section.id + "-chart"), spec: chart.spec, rows: chosen });
      if (select) select.addEventListener("change", () => draw(figure));
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
    waiting = setTimeout(() => drawn.filter((figure) => figure.host.clientWidth !== figure.width).forEach(draw), 150);
  });
  named();
  drawAll().then(() => { document.documentElement.dataset.ready = "yes"; });
})();
