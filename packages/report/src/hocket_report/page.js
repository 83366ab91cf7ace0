"use strict";
// Draws the curves and histograms of the page. Texts of runs are only ever set as textContent, and reach Vega as data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const axis = document.getElementById("axis"), scale = document.getElementById("scale");
  const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const names = {batch: "batches", epoch: "epochs", sample: "samples", token: "tokens", seconds: "seconds"};
  const tip = element("div", "tip");
  tip.hidden = true;
  document.body.append(tip);

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function number(value) {
    if (value === null || value === undefined) return "not finite";
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  }

  // One run: a colour for each metric. Several: a colour for each run, and dashes for each metric.
  function look(chart, curve) {
    const labels = [...new Set(chart.curves.map((each) => each.label))], index = labels.indexOf(curve.label);
    if (data.runs.length > 1) return {colour: data.runs[curve.run].colour, dash: dashes[index % dashes.length]};
    const colour = index < 8 ? `var(--series-${index})` : `hsl(${(index * 137) % 360} 60% 50%)`;
    return {colour, dash: []};
  }

  const labels = (digits = 4) => `datum.value == 0 ? '0' : abs(datum.value) >= 1e4 ? format(datum.value, '.${digits}~s') : abs(datum.value) < 1e-3 ? format(datum.value, '.${digits - 2}~e') : format(datum.value, '.${digits + 1}~r')`;

  // As many digits as tell apart the values of a curve that is nearly flat.
  function digits(values) {
    const finite = values.filter(Number.isFinite), high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    const low = finite.reduce((a, b) => Math.min(a, b), Infinity), ratio = Math.max(Math.abs(high), Math.abs(low)) / (high - low);
    return ratio > 0 && ratio < 1e9 ? Math.max(4, Math.ceil(Math.log10(ratio)) + 2) : 4;
  }

  const config = {
    background: null, view: {stroke: null}, font: "system-ui, sans-serif",
    axis: {labelColor: "currentColor", titleColor: "currentColor", gridColor: "var(--line)", domainColor: "var(--line)",
      tickColor: "var(--line)", titleFontWeight: "normal", labelFontSize: 11, titleFontSize: 11, labelFlush: true},
  };

  function specification(chart) {
    const by = axis.value, values = [];
    chart.curves.forEach((curve, index) => {
      const xs = data.positions[curve.run][by];
      curve.at.forEach((at, i) => {
        const y = curve.y[i];
        values.push({c: index, i, x: xs[at], y: scale.value === "log" && !(y > 0) ? null : y});
      });
    });
    const looks = chart.curves.map((curve) => look(chart, curve)), domain = looks.map((_, index) => index);
    const x = {field: "x", type: "quantitative", axis: {title: names[by], labelExpr: labels(), tickCount: 5, grid: false}, scale: {zero: false, nice: false}};
    const y = {field: "y", type: "quantitative", axis: {title: null, tickCount: 5, labelExpr: labels(digits(values.map((each) => each.y)))}, scale: {zero: false, type: scale.value}};
    const colour = {field: "c", type: "nominal", scale: {domain, range: looks.map((each) => each.colour)}, legend: null};
    const dash = {field: "c", type: "nominal", scale: {domain, range: looks.map((each) => each.dash)}, legend: null};
    const hover = {name: "hover", select: {type: "point", fields: ["c", "i"], nearest: true, on: "pointermove", clear: "pointerout"}};
    const line = {mark: {type: "line", strokeWidth: 1.6, invalid: "break-paths-show-path-domains"}, encoding: {x, y, color: colour, strokeDash: dash}};
    const lonely = new Set(chart.curves.flatMap((curve, index) => curve.at.length === 1 ? [index] : []));
    const dots = {
      transform: [{filter: "isValid(datum.y)"}], params: [hover],
      mark: {type: "point", filled: true, size: 50},
      encoding: {x, y, color: colour, opacity: {condition: [{param: "hover", empty: false, value: 1}, {test: `indexof(${JSON.stringify([...lonely])}, datum.c) >= 0`, value: 1}], value: 0}},
    };
    return {width: "container", height: "container", padding: 2, autosize: {type: "fit", contains: "padding"}, config,
      data: {values}, layer: [line, dots]};
  }

  function describe(chart, datum) {
    const curve = chart.curves[datum.c], where = data.positions[curve.run], at = curve.at[datum.i];
    const lines = [`${curve.label} ${number(curve.y[datum.i])}`];
    if (data.runs.length > 1) lines.unshift(data.runs[curve.run].name);
    lines.push(`epoch ${number(where.epoch[at])}, batch ${number(where.batch[at])}`);
    lines.push(`${number(where.seconds[at])} s`);
    return lines.join("\n");
  }

  function show(specification, plot, text) {
    const options = {mode: "vega-lite", renderer: "svg", actions: false, tooltip: false, defaultStyle: false};
    return vegaEmbed(plot, specification, options).then(({view}) => {
      if (text) hover(view, plot, text);
      return view;
    });
  }

  function hover(view, plot, text) {
    view.addEventListener("pointermove", (event, item) => {
      let datum = item && item.datum;
      if (datum && datum.datum) datum = datum.datum;  // a cell of the Voronoi diagram
      tip.hidden = !datum || datum.i === undefined;
      if (tip.hidden) return;
      tip.textContent = text(datum);
      const box = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
    });
    plot.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  function key(look, text) {
    const made = element("span"), space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "line");
    svg.setAttribute("viewBox", "0 0 26 8");
    for (const [name, value] of Object.entries({x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": look.dash.join(" ")}))
      line.setAttribute(name, value);
    line.style.stroke = look.colour;
    svg.append(line);
    made.append(svg, text);
    return made;
  }

  const views = new Map();

  function draw(place) {
    if (place.dataset.histogram !== undefined) {
      const {counts, edges} = data.histograms[place.dataset.histogram];
      const values = counts.map((count, i) => ({from: edges[i], to: edges[i + 1], count}));
      const spec = {
        width: "container", height: "container", padding: 2, autosize: {type: "fit", contains: "padding"}, config, data: {values},
        mark: {type: "bar", color: "var(--series-0)", tooltip: null},
        encoding: {
          x: {field: "from", type: "quantitative", bin: {binned: true}, axis: {title: null, tickCount: 6, labelExpr: labels(), grid: false}}, x2: {field: "to"},
          y: {field: "count", type: "quantitative", axis: {title: "values", tickCount: 4, labelExpr: labels()}},
        },
      };
      show(spec, place);
      return;
    }
    const chart = data.charts[place.dataset.chart];
    if (!views.has(place)) {
      const keys = element("div", "keys");
      for (const curve of chart.curves) {
        const words = [data.runs.length > 1 ? data.runs[curve.run].name : null, curve.label === chart.title && data.runs.length > 1 ? null : curve.label];
        if (curve.odd) words.push(`(${curve.odd} not finite)`);
        keys.append(key(look(chart, curve), words.filter((each) => each !== null).join(" ")));
      }
      const heading = element("h4", "", chart.title);
      heading.append(element("small", "", chart.section));
      place.append(heading, keys, element("div", "plot"));
    } else {
      views.get(place).then((view) => view.finalize());
    }
    const plot = place.querySelector(".plot");
    plot.textContent = "";
    views.set(place, show(specification(chart), plot, (datum) => describe(chart, datum)));
  }

  const places = [...document.querySelectorAll(".chart, [data-histogram]")], drawn = new Set();

  function once(place) {
    if (drawn.has(place)) return;
    drawn.add(place);
    draw(place);
  }

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      once(entry.target);
    }
  }, {rootMargin: "400px"});
  for (const place of places) {
    if (place.matches(".chart")) place.style.minHeight = "270px";
    observer.observe(place);
  }
  addEventListener("beforeprint", () => places.forEach(once));
  for (const control of [axis, scale])
    control.addEventListener("change", () => drawn.forEach((place) => place.matches(".chart") && draw(place)));
})();
