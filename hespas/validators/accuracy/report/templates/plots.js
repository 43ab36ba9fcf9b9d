"use strict";
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const at = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 45rem)");

  // ---- texts ----
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];
  const unitOf = (ns) => units.find(([size]) => Math.abs(ns) >= size) || units[3];
  const digits = (value, most = 3) => {
    const places = Math.max(0, most - Math.max(1, Math.floor(Math.log10(Math.abs(value) || 1)) + 1));
    return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  };
  const timeText = (ns, sign = "") => {
    if (ns === null || Number.isNaN(ns)) return "–";
    const [size, unit] = unitOf(ns);
    return `${ns > 0 ? sign : ""}${digits(ns / size)} ${unit}`;
  };
  const percentText = (share, sign = "") => share === null || Number.isNaN(share) ? "–"
    : `${share > 0 ? sign : ""}${(share * 100).toLocaleString("en-US", { minimumFractionDigits: Math.abs(share) < 10 ? 1 : 0, maximumFractionDigits: Math.abs(share) < 10 ? 1 : 0 })}%`;
  const countText = (count) => count.toLocaleString("en-US");
  const rateText = (rate) => {
    const [size, unit] = [[1e15, "PFLOP/s"], [1e12, "TFLOP/s"], [1e9, "GFLOP/s"], [1e6, "MFLOP/s"], [1, "FLOP/s"]].find(([each]) => rate >= each) || [1, "FLOP/s"];
    return `${digits(rate / size)} ${unit}`;
  };
  const clip = (text, most) => text.length <= most ? text : `${text.slice(0, most - 1)}…`;
  // Plotly reads its texts as a little HTML and as templates; names are neither.
  const safe = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const wrapped = (text, width = 56, most = 4) => {
    const letters = Array.from(text);
    const lines = [];
    for (let start = 0; start < letters.length && lines.length < most; start += width) lines.push(letters.slice(start, start + width).join(""));
    if (letters.length > width * most) lines[most - 1] += "…";
    return lines.map(safe).join("<br>");
  };
  const named = (row) => data.texts[row] || "(unnamed)";
  // Shapes begin with the operation: "aten::mm(8x4xf32, 4x2xf32) -> 8x2xf32".
  const workOf = (label, shape) => shape.startsWith(label) ? shape.slice(label.length).trim() : shape;
  const errorOf = (predicted, measured) => predicted === null || !(measured > 0) ? null : (predicted - measured) / measured;

  // ---- colours: Okabe and Ito's, which people with any colour vision tell apart; symbols beside them ----
  const palettes = {
    light: { ink: "#16191d", faint: "#5a626c", grid: "#e3e6ea", line: "#9aa2ab", ground: "#ffffff", many: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d"] },
    dark: { ink: "#e8eaed", faint: "#a7afb8", grid: "#2d3339", line: "#707983", ground: "#14171a", many: ["#56b4e9", "#e69f00", "#2fc79a", "#e29ac2", "#f0e442", "#f08a4b", "#c8ccd0"] },
  };
  const symbols = ["circle", "diamond", "square", "triangle-up", "cross", "x", "triangle-down"];
  const colours = () => (dark.matches ? palettes.dark : palettes.light);
  // The classes that are there, those with most time first: the same colour in every figure.
  const classTime = new Map();
  data.points.op_class.forEach((code, row) => classTime.set(code, (classTime.get(code) || 0) + (data.points.measured_ns[row] || 0)));
  const classes = [...classTime.keys()].sort((one, two) => classTime.get(two) - classTime.get(one));
  const styleOf = (code) => {
    const place = Math.max(classes.indexOf(code), 0);
    const many = colours().many;
    return { color: many[place % many.length], symbol: symbols[(place + Math.floor(place / many.length)) % symbols.length] };
  };

  // ---- choices ----
  const options = (select, texts) => texts.forEach((text, row) => {
    const option = document.createElement("option");
    option.value = String(row);
    option.textContent = clip(text, 90);
    select.append(option);
  });
  const devices = [...new Set(data.sources.map((source) => source.hardware))];
  const estimatorTexts = data.estimators.map((text, row) => row < data.requested ? text : `${text} (naive)`);
  options(at("pick-estimator"), estimatorTexts);
  options(at("pick-device"), devices);
  const estimator = () => Number(at("pick-estimator").value) || 0;
  const device = () => devices[Number(at("pick-device").value) || 0];
  if (devices.length < 2) at("pick-device").parentElement.hidden = true;
  const hide = (id) => { at(id).parentElement.style.display = "none"; };
  if (devices.length < 2) hide("pick-device");

  // ---- figures ----
  const config = { displaylogo: false, responsive: true, scrollZoom: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  const layout = (more) => {
    const { ink, faint, ground } = colours();
    return {
      paper_bgcolor: ground, plot_bgcolor: ground, font: { family: "system-ui, sans-serif", size: 12, color: ink },
      margin: { l: 66, r: 14, t: 34, b: 52 }, hovermode: "closest", dragmode: narrow.matches ? false : "zoom",
      hoverlabel: { bgcolor: ground, bordercolor: faint, font: { color: ink, size: 12 }, align: "left" },
      legend: { font: { size: 11 }, itemsizing: "trace", ...(narrow.matches ? { orientation: "h", y: -0.2, x: 0 } : { y: 1, x: 1.02 }) },
      ...more,
    };
  };
  const axis = (title, more) => {
    const { grid, line } = colours();
    return { title: { text: title, standoff: 8 }, gridcolor: grid, linecolor: line, zerolinecolor: line, automargin: true, ...more };
  };
  // Ticks of whole decades, at most seven, in words.
  const decades = (low, high, text) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const step = Math.max(1, Math.ceil((last - first) / (narrow.matches ? 5 : 8)));
    const values = [];
    for (let power = first; power <= last; power += step) values.push(10 ** power);
    return { type: "log", tickvals: values, ticktext: values.map(text), range: [Math.log10(low), Math.log10(high)] };
  };
  const plainTime = (ns) => { const [size, unit] = unitOf(ns); return `${Number((ns / size).toPrecision(3))} ${unit}`; };
  // A legend below a narrow figure takes its own room: rows of 20 px.
  const legendHeight = (rows) => narrow.matches ? 330 + 20 * rows : undefined;
  const draw = (id, traces, about, words) => {
    const place = at(id);
    if (!traces.length) {
      Plotly.purge(place);
      place.className = "plot empty";
      place.style.height = "";
      place.textContent = words;
      place.removeAttribute("role");
      return;
    }
    if (place.classList.contains("empty")) { place.textContent = ""; place.className = "plot"; }
    place.style.height = about.height ? `${about.height}px` : "";
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", words);
    Plotly.react(place, traces, about, config);
  };
  const pointText = (row, extra) => {
    const points = data.points;
    return [`<b>${wrapped(named(points.label[row]), 56, 2)}</b>`, wrapped(named(points.shape[row])), safe(data.sources[points.source[row]].name), extra].join("<br>");
  };
  const rowsOfDevice = () => {
    const rows = [];
    data.points.source.forEach((source, row) => { if (data.sources[source].hardware === device()) rows.push(row); });
    return rows;
  };
  const byClass = (rows, x, y, text) => classes.map((code) => {
    const mine = rows.filter((row) => data.points.op_class[row] === code);
    const { color, symbol } = styleOf(code);
    return {
      type: "scatter", mode: "markers", name: safe(data.classes[code]), x: mine.map(x), y: mine.map(y), text: mine.map(text), hoverinfo: "text",
      marker: { color, symbol, size: mine.length > 1500 ? 5 : 7, opacity: mine.length > 400 ? 0.55 : 0.8 },
    };
  }).filter((trace) => trace.x.length);
  const line = (x, y, name, dash, width = 1.5, color = colours().faint, more = {}) => ({ type: "scatter", mode: "lines", x, y, name, hoverinfo: "skip", line: { color, dash, width }, ...more });
  const least = (values) => values.reduce((one, two) => Math.min(one, two), Infinity);
  const most = (values) => values.reduce((one, two) => Math.max(one, two), -Infinity);

  const drawScatter = () => {
    const predicted = data.points.predicted_ns[estimator()], measured = data.points.measured_ns;
    const rows = rowsOfDevice().filter((row) => predicted[row] > 0 && measured[row] > 0);
    if (!rows.length) return draw("plot-scatter", [], {}, "This estimator predicts none of the measured operations.");
    const low = least(rows.map((row) => Math.min(predicted[row], measured[row]))) / 1.6;
    const high = most(rows.map((row) => Math.max(predicted[row], measured[row]))) * 1.6;
    const span = [low / 10, high * 10];
    const guides = [line(span, span, "exact", "solid", 1.5, colours().faint, { showlegend: false })];
    [[2, "twice"], [0.5, "half"]].forEach(([factor, word]) => guides.push(line(span, span.map((value) => value * factor), word, "dash", 1, colours().faint, { showlegend: false })));
    const points = byClass(rows, (row) => measured[row], (row) => predicted[row], (row) => pointText(row,
      `predicted ${timeText(predicted[row])}, measured ${timeText(measured[row])}, <b>${percentText(errorOf(predicted[row], measured[row]), "+")}</b>`));
    draw("plot-scatter", [...guides, ...points], layout({ xaxis: axis("measured", decades(low, high, plainTime)), yaxis: axis("predicted", decades(low, high, plainTime)), height: legendHeight(Math.ceil(points.length / 2)) }),
      `Predicted against measured time of ${countText(rows.length)} operations.`);
  };

  const leastError = 1e-3;
  const drawCurves = () => {
    const chosen = estimator();
    const mine = data.curves.filter((curve) => curve.hardware === device());
    const wanted = (curve) => curve.op_class === -1 ? curve.estimator === chosen || curve.estimator >= data.requested : curve.estimator === chosen && curve.n >= data.few;
    const rank = (curve) => curve.op_class === -1 ? (curve.estimator === chosen ? -2 : -1) : classes.indexOf(curve.op_class);
    const traces = mine.filter(wanted).sort((one, two) => rank(one) - rank(two)).map((curve) => {
      const own = curve.estimator === chosen, whole = curve.op_class === -1;
      const place = curve.estimator - data.requested;
      const color = whole ? (own ? colours().ink : colours().faint) : styleOf(curve.op_class).color;
      const last = curve.quantiles.length - 1;
      const x = curve.quantiles.map((error) => Math.max(error === null ? leastError : error, leastError));
      const y = curve.quantiles.map((_, row) => (row + 1) / (last + 1));
      const name = whole ? (own ? "all classes" : `all, ${data.estimators[curve.estimator]}`) : data.classes[curve.op_class];
      return {
        type: "scatter", mode: "lines", name: safe(name), x: [x[0], ...x], y: [0, ...y], hoverinfo: "text",
        text: ["", ...y.map((share, row) => `<b>${safe(name)}</b><br>${percentText(share)} of ${countText(curve.n)} within ${percentText(curve.quantiles[row])}`)],
        line: { color, shape: "hv", width: whole && own ? 3 : 1.7, dash: own ? (classes.indexOf(curve.op_class) < colours().many.length ? "solid" : "6px,2px") : ["dot", "dashdot", "longdash"][place % 3] },
      };
    });
    const floor = data.noise[device()];
    const shapes = floor > leastError ? [{ type: "line", x0: floor, x1: floor, y0: 0, y1: 1, line: { color: colours().faint, width: 1, dash: "dash" } }] : [];
    const annotations = shapes.length ? [{ x: Math.log10(floor), y: 1, yanchor: "top", xanchor: "right", text: "noise floor", showarrow: false, font: { size: 11, color: colours().faint }, bgcolor: colours().ground }] : [];
    const far = Math.min(Math.max(most(traces.flatMap((trace) => trace.x)), 1) * 1.3, 1e4);
    draw("plot-cdf", traces, layout({ xaxis: axis("absolute error", decades(leastError, far, (share) => `${Number((share * 100).toPrecision(3)).toLocaleString("en-US")}%`)), yaxis: axis("share of cases", { range: [0, 1.02], tickformat: ".0%" }), shapes, annotations, height: legendHeight(Math.ceil(traces.length / 2)) }),
      traces.length ? "Share of operations within an error, per class." : "This estimator predicts none of the measured operations.");
  };

  const drawRoof = () => {
    const points = data.points;
    const rate = (row) => points.flops[row] / points.measured_ns[row] * 1e9;
    const intensity = (row) => points.flops[row] / points.bytes_moved[row];
    const rows = rowsOfDevice().filter((row) => points.flops[row] > 0 && points.bytes_moved[row] > 0 && points.measured_ns[row] > 0);
    at("about-roof").textContent = `FLOPs over bytes moved against the rate achieved, ${countText(rows.length)} operations that compute and move something; lines: what the device could reach.`;
    if (!rows.length) return draw("plot-roof", [], {}, "No measured operation has both FLOPs and bytes.");
    const roof = data.roofs.find((each) => each.hardware === device());
    const xs = rows.map(intensity), ys = rows.map(rate);
    let low = least(xs) / 2, high = most(xs) * 2;
    let bottom = least(ys) / 2, top = most(ys) * 2;
    const lines = [];
    if (roof) {
      const bandwidth = roof.bandwidth_bytes_per_s, ceilings = roof.ceilings;
      if (bandwidth && ceilings.length) high = Math.max(high, ceilings[0].flops_per_s / bandwidth * 4);
      if (ceilings.length) top = Math.max(top, ceilings[0].flops_per_s * 2);
      const dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
      ceilings.forEach((ceiling, row) => {
        const knee = bandwidth ? Math.max(ceiling.flops_per_s / bandwidth, low) : low;
        lines.push(line([knee, high], [ceiling.flops_per_s, ceiling.flops_per_s], safe(`${clip(ceiling.name, 34)}: ${rateText(ceiling.flops_per_s)}`), dashes[row % 6], 2, colours().ink));
      });
      if (bandwidth) {
        const end = ceilings.length ? ceilings[0].flops_per_s / bandwidth : high;
        lines.unshift(line([low, end], [low * bandwidth, end * bandwidth], safe(`${roof.memory}: ${digits(bandwidth / 1e9)} GB/s`), "solid", 2, colours().faint));
        bottom = Math.min(bottom, Math.max(low * bandwidth, bottom / 10));
      }
    }
    const marks = byClass(rows, intensity, rate, (row) => pointText(row, `${rateText(rate(row))} at ${digits(intensity(row))} FLOP/byte, ${timeText(points.measured_ns[row])}`));
    draw("plot-roof", [...lines, ...marks], layout({
      xaxis: axis("FLOP/byte", decades(low, high, (value) => String(Number(value.toPrecision(3))))),
      yaxis: axis("achieved", decades(bottom, top, (value) => { const text = rateText(value).split(" "); return `${Number(text[0].replace(/,/g, ""))} ${text[1]}`; })),
      height: legendHeight(lines.length + marks.length) || 460,
    }), `Roofline: rate over arithmetic intensity of ${countText(rows.length)} operations.`);
  };

  const drawFall = () => {
    const source = Number(at("pick-source").value);
    const found = data.waterfalls.find((each) => each.source === source && each.estimator === estimator());
    if (!found) return draw("plot-fall", [], {}, "Nothing of this source is predicted by this estimator.");
    const labels = found.parts.map((part) => named(part.label));
    const rest = (part) => workOf(named(part.label), named(part.shape));
    const bars = [{ text: "measured", measure: "absolute", value: found.measured_ns }];
    if (found.uncovered_ns) bars.push({ text: "not estimated", measure: "relative", value: -found.uncovered_ns });
    found.parts.forEach((part) => bars.push({
      text: labels.filter((label) => label === named(part.label)).length > 1 && !narrow.matches ? `${named(part.label)} ${rest(part)}` : named(part.label), measure: "relative", value: part.predicted_ns - part.measured_ns,
      more: `${wrapped(named(part.shape))}<br>${safe(part.op_class)}, n ${countText(part.count)}: predicted ${timeText(part.predicted_ns)}, measured ${timeText(part.measured_ns)}`,
    }));
    if (Math.abs(found.rest_ns) > 1e-9 * found.measured_ns) bars.push({ text: "all others", measure: "relative", value: found.rest_ns });
    bars.push({ text: "predicted", measure: "total", value: found.predicted_ns });
    const [size, unit] = unitOf(Math.max(found.measured_ns, found.predicted_ns));
    const { many, faint } = colours();
    const trace = {
      type: "waterfall", orientation: "h", measure: bars.map((bar) => bar.measure), y: bars.map((_, row) => row), x: bars.map((bar) => bar.measure === "total" ? null : bar.value / size),
      hoverinfo: "text", hovertext: bars.map((bar) => `<b>${wrapped(bar.text, 56, 2)}</b><br>${bar.more ? `${bar.more}<br>` : ""}${bar.measure === "relative" ? timeText(bar.value, "+") : timeText(bar.value)} (${percentText(bar.value / found.measured_ns, bar.measure === "relative" ? "+" : "")} of the measured time)`),
      text: bars.map((bar) => bar.measure === "relative" ? timeText(bar.value, "+") : timeText(bar.value)), textposition: "outside", cliponaxis: false, textfont: { size: 11 },
      increasing: { marker: { color: many[1] } }, decreasing: { marker: { color: many[0] } }, totals: { marker: { color: faint } }, connector: { line: { color: faint, width: 1 } },
    };
    let sum = 0, low = 0, high = 0;
    bars.forEach((bar) => { sum = bar.measure === "relative" ? sum + bar.value : bar.value; low = Math.min(low, sum); high = Math.max(high, sum); });
    const room = (high - low) * (narrow.matches ? 0.34 : 0.1);
    draw("plot-fall", [trace], layout({
      xaxis: axis(unit, { range: [(low < 0 ? low - room : 0) / size, (high + room) / size], nticks: narrow.matches ? 4 : 10 }),
      yaxis: axis("", { tickvals: bars.map((_, row) => row), ticktext: bars.map((bar) => safe(clip(bar.text, narrow.matches ? 16 : 42))), range: [bars.length - 0.4, -0.6], showgrid: false, zeroline: false }),
      height: 90 + 24 * bars.length, showlegend: false, margin: { l: 10, r: 14, t: 34, b: 46 },
    }), `From ${timeText(found.measured_ns)} measured to ${timeText(found.predicted_ns)} predicted.`);
  };

  const tones = ["measured", "simulated", "simulated, on the critical path"];
  const drawTime = () => {
    if (!at("plot-time")) return;
    const lanes = [data.timelines[Number(at("pick-time").value) || 0], data.simulated].filter(Boolean);
    const many = colours().many;
    const traces = [], ticks = [], about = [];
    let lane = 0, end = 0;
    lanes.forEach((each) => {
      each.names.forEach((text, row) => ticks.push([lane + row, `${each.tone.includes(0) ? "measured" : "simulated"}: ${clip(text, narrow.matches ? 12 : 30)}`]));
      tones.forEach((tone, code) => {
        const rows = each.tone.flatMap((found, row) => (found === code ? [row] : []));
        if (!rows.length) return;
        traces.push({
          type: "bar", orientation: "h", name: tone, y: rows.map((row) => lane + each.lane[row]), base: rows.map((row) => each.start_ns[row]), x: rows.map((row) => each.duration_ns[row]),
          width: 0.8, marker: { color: [many[0], many[4], many[1]][code], line: { width: 0 } }, hoverinfo: "text",
          hovertext: rows.map((row) => `<b>${wrapped(named(each.label[row]), 56, 3)}</b><br>${safe(each.names[each.lane[row]])}, from ${timeText(each.start_ns[row])}, for ${timeText(each.duration_ns[row])}`),
        });
      });
      end = Math.max(end, most(each.start_ns.map((start, row) => start + each.duration_ns[row])));
      const cut = each.of > each.lane.length ? `the ${countText(each.lane.length)} longest of ${countText(each.of)} spans (${percentText(each.shown_share)} of their time)` : `${countText(each.of)} spans`;
      about.push(`${each.title}: ${cut}${each.lanes_of > each.names.length ? `, the ${each.names.length} busiest of ${each.lanes_of} lanes` : ""}`);
      lane += each.names.length + 0.6;
    });
    at("about-time").textContent = `${about.join("; ")}. One run of median length${lanes.length > 1 ? "; both begin at 0" : ""}.`;
    const [size, unit] = unitOf(end);
    const step = 10 ** Math.floor(Math.log10(end / (narrow.matches ? 3 : 8)));
    const spacing = step * ([1, 2, 5].find((each) => end / (each * step) <= (narrow.matches ? 5 : 12)) || 10);
    const values = [];
    for (let value = 0; value <= end; value += spacing) values.push(value);
    draw("plot-time", traces, layout({
      barmode: "overlay", xaxis: axis(unit, { tickvals: values, ticktext: values.map((value) => String(Number((value / size).toPrecision(6)))), range: [0, end * 1.01] }),
      yaxis: axis("", { tickvals: ticks.map(([row]) => row), ticktext: ticks.map(([, text]) => safe(text)), range: [lane - 0.9, -0.6], showgrid: false, zeroline: false }),
      height: 130 + 30 * lane, margin: { l: 10, r: 14, t: 34, b: 46 }, legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 } },
    }), "What ran when.");
  };

  const drawAll = () => { drawScatter(); drawCurves(); drawRoof(); drawFall(); drawTime(); };
  const fillSources = () => {
    const select = at("pick-source");
    select.textContent = "";
    const seen = [...new Set(data.waterfalls.map((each) => each.source))].filter((source) => data.sources[source].hardware === device());
    seen.forEach((source) => {
      const option = document.createElement("option");
      option.value = String(source);
      option.textContent = clip(data.sources[source].name, 90);
      select.append(option);
    });
    select.parentElement.style.display = seen.length > 1 ? "" : "none";
  };
  fillSources();
  if (at("pick-time")) {
    options(at("pick-time"), data.timelines.map((each) => each.title));
    if (data.timelines.length < 2) hide("pick-time");
    at("pick-time").addEventListener("change", drawTime);
  }
  at("pick-estimator").addEventListener("change", drawAll);
  at("pick-device").addEventListener("change", () => { fillSources(); drawAll(); });
  at("pick-source").addEventListener("change", drawFall);
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  addEventListener("beforeprint", drawAll);

  drawAll();
})();
