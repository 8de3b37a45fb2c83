// Draws the page from the JSON in it, again and again where a server has news. Text is set as text, never as markup.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const settings = read("settings");
  let values = read("values");
  const state = { group: null, run: null, variant: {}, whole: {} };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const narrow = matchMedia("(max-width: 560px)");

  // -- elements ------------------------------------------------------------------------------------------------

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const colour = (index) => (index === null || index === undefined ? "var(--muted)" : `var(--c${index})`);
  const swatch = (index) => make("span", { class: "swatch", style: { background: colour(index) } });

  // A number and its unit stay on one line.
  const tied = (text) => text.replace(/([\d.]) (?=(%|[kMGT]?B|s|min|h)(?![\w]))/g, "$1\u00a0");

  // -- facts ---------------------------------------------------------------------------------------------------

  const SHARES = { training: "var(--c0)", waiting: "var(--c4)", exchange: "var(--c2)" };

  function fact(one) {
    return make("section", { class: "fact" },
      make("h2", {}, one.question),
      make("div", { class: "answer" }, tied(one.answer)),
      one.unit ? make("div", { class: "unit" }, one.unit) : null,
      one.shares ? split(one.shares) : null,
      one.bars.length ? bars(one.bars) : null,
      make("ul", { class: "lines" }, ...one.lines.filter(Boolean).map((text) => make("li", {}, tied(text)))));
  }

  function bars(all) {
    const most = Math.max(...all.map((one) => one.value || 0), 1e-9);
    return make("div", { class: "bars" }, ...all.map((one) => make("div", { class: "bar" },
      make("span", { class: "name" }, one.value === null ? swatch(one.colour) : null, one.label),
      make("span", {}, tied(one.text)),
      one.value === null ? null : make("div", { class: "track" }, make("div", {
        class: "fill", style: { width: `${100 * one.value / most}%`, background: colour(one.colour) },
      })))));
  }

  function split(shares) {
    return make("div", {},
      make("div", { class: "split", role: "img", "aria-label": shares.map((s) => `${s.label} ${s.text}`).join(", ") },
        ...shares.filter((s) => s.value > 0).map((s) => make("div", { style: { flexGrow: s.value, background: SHARES[s.label] } }))),
      make("div", { class: "keys" }, ...shares.map((s) => make("span", {},
        make("span", { class: "swatch", style: { background: SHARES[s.label] } }), `${s.label} ${tied(s.text)}`))));
  }

  // -- charts --------------------------------------------------------------------------------------------------

  function resolve(value, theme) {
    if (typeof value === "string" && value[0] === "@") {
      const [name, alpha] = value.slice(1).split("/");
      const found = theme.getPropertyValue(`--${name}`).trim();
      if (!alpha) return found;
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(found.slice(at, at + 2), 16));
      return `rgba(${r},${g},${b},${alpha})`;
    }
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map((one) => resolve(one, theme));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, theme)]));
    return value;
  }

  function layoutOf(own, theme) {
    const get = (name) => theme.getPropertyValue(`--${name}`).trim();
    const grid = { gridcolor: get("grid"), linecolor: get("edge"), zerolinecolor: get("grid"), tickfont: { size: 12 }, fixedrange: coarse.matches };
    const layout = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: get("ink") },
      paper_bgcolor: get("surface"), plot_bgcolor: get("surface"),
      margin: { l: 12, r: 16, t: 12, b: 12 },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 12 }, traceorder: "normal" },
      hoverlabel: { font: { size: 13 }, align: "left", bgcolor: get("surface"), bordercolor: get("muted") },
      dragmode: coarse.matches ? false : "zoom",
      ...resolve(own, theme),
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      const given = layout[name];
      layout[name] = { ...grid, ...given, title: { standoff: 8, ...given.title, font: { size: 13, color: get("muted") } } };
      if (narrow.matches && name.startsWith("x") && !given.nticks) layout[name].nticks = 6;
    }
    return layout;
  }

  function draw(node, chart) {
    const theme = getComputedStyle(document.documentElement);
    const names = chart.variants.map((one) => one.name);
    const at = Math.max(0, names.indexOf(state.variant[chart.id]));
    const variant = chart.variants[at];
    const layout = layoutOf(variant.layout, theme);
    const whole = Boolean(state.whole[chart.id]);
    if (whole && layout.yaxis?.range) layout.yaxis.range = wholeRange(variant.data);
    layout.uirevision = `${node.dataset.owner} ${variant.name} ${whole}`; // another run or axis begins with its own zoom
    const names_shown = new Set(variant.data.filter((one) => one.showlegend !== false).map((one) => one.name)).size;
    // One name below the other on narrow screens; elsewhere long names take half a row, or all of it.
    const rows = narrow.matches ? names_shown - 1 : names_shown - 4;
    const legend = layout.showlegend ? 20 * Math.max(0, rows) : 0;
    node.style.height = `${chart.height + legend}px`;
    node.chart = chart;
    return Plotly.react(node, resolve(variant.data, theme), layout, { responsive: true, displayModeBar: false, displaylogo: false });
  }

  function save(node, format) {
    const wide = { format, width: Math.max(node.clientWidth, 900), height: Math.max(node.clientHeight, 420), filename: node.chart.id };
    return Plotly.downloadImage(node, format === "png" ? { ...wide, scale: 2 } : wide);
  }

  function wholeRange(data) {
    let low = Infinity;
    let high = -Infinity;
    for (const trace of data) {
      for (const y of trace.y) if (y !== null) { low = Math.min(low, y); high = Math.max(high, y); }
    }
    const room = 0.04 * (high - low);
    return [low - room, high + room];
  }

  function wholeScale(chart, plot) {
    return make("span", { class: "switch" }, make("button", {
      type: "button", "aria-pressed": String(Boolean(state.whole[chart.id])),
      onclick: (event) => {
        state.whole[chart.id] = !state.whole[chart.id];
        event.currentTarget.setAttribute("aria-pressed", String(state.whole[chart.id]));
        draw(plot, plot.chart);
      },
    }, "whole scale"));
  }

  function card(prefix, chart, owner) {
    const id = `${prefix}-${chart.id}`;
    let node = document.getElementById(id);
    const ranged = chart.variants.some((one) => one.layout.yaxis?.range);
    const kind = `${chart.variants.map((one) => one.name).join()} ${ranged}`;
    if (node && node.dataset.names === kind) {
      node.querySelector(".note").textContent = chart.note;
      const plot = node.querySelector(".plot");
      plot.dataset.owner = owner;
      draw(plot, chart);
      return node;
    }
    const plot = make("div", { class: "plot", role: "img", "aria-label": `${chart.title}: ${chart.note}`, "data-owner": owner });
    const pick = make("span", { class: "switch" });
    if (chart.variants.length > 1) {
      pick.append(chart.switch);
      for (const one of chart.variants) {
        pick.append(make("button", {
          type: "button", "aria-pressed": String(one.name === (state.variant[chart.id] || chart.variants[0].name)),
          onclick: (event) => {
            state.variant[chart.id] = one.name;
            for (const other of pick.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === event.currentTarget));
            draw(plot, plot.chart);
          },
        }, one.name));
      }
    }
    const saving = make("span", { class: "save" }, ...["png", "svg"].map((format) => make("button", {
      type: "button", title: `Save this chart as ${format.toUpperCase()}`, onclick: () => save(plot, format),
    }, format.toUpperCase())));
    const wide = ["loss", "decisions", "timeline"].includes(chart.id);
    node = make("section", { class: wide ? "card wide" : "card", id, "data-names": kind },
      make("div", { class: "head" }, make("h3", {}, chart.title), make("div", { class: "tools" }, pick, ranged ? wholeScale(chart, plot) : null, saving)),
      make("p", { class: "note" }, chart.note), plot);
    return node;
  }

  function fill(parent, prefix, charts, owner) {
    const nodes = charts.map((chart) => card(prefix, chart, owner));
    for (const old of [...parent.children]) {
      if (!nodes.includes(old)) { Plotly.purge(old.querySelector(".plot")); old.remove(); }
    }
    nodes.forEach((node, index) => { if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] || null); });
    // A lone chart in its row takes all of it: no holes in the page.
    let open = null;
    nodes.forEach((node, index) => {
      const whole = ["loss", "decisions", "timeline"].includes(charts[index].id);
      node.classList.toggle("wide", whole);
      if (whole) { if (open) open.classList.add("wide"); open = null; } else { open = open ? null : node; }
    });
    if (open) open.classList.add("wide");
    nodes.forEach((node, index) => { const plot = node.querySelector(".plot"); if (!plot.chart) draw(plot, charts[index]); });
  }

  // -- tables --------------------------------------------------------------------------------------------------

  // A table that is cut at its edge says so, also one that is opened, or made narrow, later.
  const wider = new ResizeObserver((all) => all.forEach(({ target }) =>
    target.parentNode?.classList.toggle("cut", target.scrollWidth > target.clientWidth + 1)));

  function table(one, tall = false) {
    const short = (text) => text.length < 24;
    const rows = one.rows.map((cells, at) => make("tr", {}, ...cells.map((text, index) => (index === 0
      ? make("th", { scope: "row" }, one.colours ? swatch(one.colours[at]) : null, text)
      : make("td", { class: short(text) ? "tight" : null }, text)))));
    const scroll = make("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": one.title || "table" },
      make("table", {}, make("thead", {}, make("tr", {}, ...one.columns.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows)));
    wider.observe(scroll);
    return make("div", { class: "frame" }, make("p", { class: "hint" }, "The table goes on to the right: scroll it sideways →"), scroll);
  }

  // -- the page ------------------------------------------------------------------------------------------------

  const slots = {};
  function build() {
    const main = document.getElementById("page");
    main.replaceChildren();
    for (const name of ["head", "notices", "picks", "facts", "now", "compare", "charts", "detail", "details", "rounds", "settings", "foot"]) {
      slots[name] = make(name === "head" ? "header" : name === "foot" ? "footer" : "div", { class: { charts: "charts", details: "charts", facts: "facts", picks: "picks" }[name] });
    }
    main.append(slots.head, slots.notices, slots.picks, slots.facts, slots.now, slots.compare,
      make("h2", {}, "Training"), slots.charts, slots.detail, slots.details, slots.rounds, slots.settings, slots.foot);
  }

  function notices(all) {
    if (!all.length) return [];
    const item = (text) => make("li", {}, text);
    const rest = all.slice(3);
    return [make("div", { class: "notices", role: "status" }, make("ul", {}, ...all.slice(0, 3).map(item)),
      rest.length ? make("details", {}, make("summary", {}, `${rest.length} more`), make("ul", {}, ...rest.map(item))) : null)];
  }

  function render() {
    document.title = `${values.title} – composer-replication`;
    const groups = values.groups;
    if (state.group === null || state.group >= groups.length) state.group = values.focus;
    if (state.run === null || state.run >= values.runs.length) {
      state.run = Math.max(0, values.runs.findIndex((run) => run.group === state.group));
    }
    slots.head.replaceChildren(make("h1", {}, values.title), make("p", { class: "sub" }, values.subtitle), ...[liveLine()].filter(Boolean));
    slots.notices.replaceChildren(...notices(values.notices));
    slots.picks.replaceChildren(...(groups.length < 2 ? [] : groups.map((group, index) => make("button", {
      type: "button", "aria-pressed": String(index === state.group),
      onclick: () => {
        state.group = index;
        state.run = Math.max(0, values.runs.findIndex((run) => run.group === index));
        render();
      },
    }, swatch(group.colour), group.label, group.runs > 1 ? ` (${group.runs} runs)` : ""))));
    slots.facts.replaceChildren(...(groups.length ? groups[state.group].facts.map(fact) : []));
    const now = values.live && values.live.now;
    slots.now.replaceChildren(...(now ? [make("h2", {}, "Now"), table({ title: "replicas now", ...now })] : []));
    slots.compare.replaceChildren(...(values.comparison
      ? [make("h2", {}, "The runs compared"), table({ title: "comparison", ...values.comparison }), make("p", { class: "note" }, values.comparison.note)] : []));
    slots.charts.previousElementSibling.hidden = !values.charts.length;
    fill(slots.charts, "all", values.charts, "all");
    detail();
    slots.settings.replaceChildren(...(values.settings.length ? [make("details", { class: "tables", id: "settings-tables", ...opened("settings-tables") },
      make("summary", {}, "Settings and versions"), ...values.settings.flatMap((one) => [make("h3", {}, one.title), table(one)]))] : []));
    slots.foot.replaceChildren(make("p", {}, `${values.generator}${values.written ? `, ${values.written}` : ""}. Drag in a chart to zoom, `
      + "double-click to go back; click a name in a legend to hide its curve."), make("p", {}, `From ${values.sources.join(", ") || "nothing"}`));
  }

  const opened = (id) => (document.getElementById(id)?.open ? { open: "" } : {});

  function detail() {
    const run = values.runs[state.run];
    if (!run) { slots.detail.replaceChildren(); slots.rounds.replaceChildren(); fill(slots.details, "run", [], ""); return; }
    const several = values.runs.length > 1;
    const pick = several ? make("select", {
      "aria-label": "Which run", onchange: (event) => { state.run = Number(event.target.value); detail(); },
    }, ...values.runs.map((one, index) => make("option", { value: index, ...(index === state.run ? { selected: "" } : {}) }, one.label))) : null;
    slots.detail.replaceChildren(make("div", { class: "pick" }, make("h2", {}, several ? "One run in detail" : "In detail"), pick));
    fill(slots.details, "run", run.charts, `run ${state.run}`);
    slots.rounds.replaceChildren(...(run.rounds.rows.length ? [make("details", { id: "rounds-table", ...opened("rounds-table") },
      make("summary", {}, `Every round as a table, the newest first${run.rounds.note ? ` (${run.rounds.note})` : ""}`), table({ title: "rounds", ...run.rounds }, true))] : []));
  }

  // -- live ----------------------------------------------------------------------------------------------------

  let heard = Date.now();
  let lost = false;

  function liveLine() {
    if (settings.poll_seconds === null) return null;
    const silent = Math.round((Date.now() - heard) / 1000);
    const live = values.live || { state: "waiting", words: "" };
    const look = lost || ["silent", "lost"].includes(live.state) ? " lost" : live.state === "running" ? "" : " over";
    const words = lost ? `no news for ${silent} s: is "status --web" still running?` : live.words;
    return make("div", { class: `live${look}`, id: "live", role: "status" }, make("span", { class: "dot" }), words);
  }

  async function poll() {
    try {
      const answer = await fetch("values.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const got = await answer.json();
      heard = Date.now();
      const changed = lost || JSON.stringify(got) !== JSON.stringify(values);
      lost = false;
      if (changed) { values = got; render(); }
    } catch {
      lost = true;
      document.getElementById("live")?.replaceWith(liveLine());
    }
    setTimeout(poll, 1000 * settings.poll_seconds);
  }

  build();
  render();
  dark.addEventListener("change", render);
  narrow.addEventListener("change", render);
  if (settings.poll_seconds !== null) setTimeout(poll, 1000 * settings.poll_seconds);
})();
