"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const STEP = 50, BARS = 12, LINES = 4;
  // Columns that say what a row is of, and those without which its figures mean little.
  const NAMES = new Set(["name", "operation", "kernel"]), TELLING = new Set(["shapes", "kind", "cause", "change"]);

  const make = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const scaled = (value, units, digits) => {
    let unit = 0;
    while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    const places = unit === 0 && Number.isInteger(value) ? 0 : digits;
    const shown = value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
    return units[unit] ? `${shown} ${units[unit]}` : shown;
  };
  const WRITE = {
    time: value => scaled(value, ["ns", "µs", "ms", "s"], 3),
    moment: value => `${(value / 1e6).toLocaleString("en", { minimumFractionDigits: 6, maximumFractionDigits: 6 })} ms`,
    bytes: value => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 2),
    flops: value => scaled(value, ["", "k", "M", "G", "T", "P", "E"], 2),
    share: value => `${(value * 100).toFixed(1)} %`,
    count: value => value.toLocaleString("en"),
    name: value => String(value),
    number: value => value.toLocaleString("en", { maximumFractionDigits: 2 }),
  };
  // Lists of extents and types, as JSON texts, in the words of people; any other text stays as it is.
  const listed = (text, one) => {
    if (!text.startsWith("[")) return text;
    try { return JSON.parse(text).map(one).join(", "); } catch { return text; }
  };
  const extents = each => (Array.isArray(each) ? (each.some(Array.isArray) ? `(${each.map(extents).join(", ")})` : each.length ? each.join("×") : "–") : String(each));
  const DTYPES = { "c10::BFloat16": "bf16", "c10::Half": "f16", float: "f32", double: "f64", int: "i32", "long int": "i64", long: "i64", "unsigned char": "u8", "signed char": "i8", Scalar: "–", ScalarList: "–", "": "–" };
  // Arguments without extents or a type, behind those that have one, say nothing.
  const stated = text => text.replace(/(^|, )–(, –)*$/, "") || "–";
  const TEXTS = { shapes: text => stated(listed(text, extents)), dtypes: text => stated(listed(text, each => DTYPES[each] || String(each))) };
  const written = (value, kind) => (value === null ? "–" : kind === "text" ? value : WRITE[kind](value));

  // Which rows of the tree only lead to one other with all of their time; modules are kept.
  const passedOn = section => {
    const of = name => section.values[section.columns.findIndex(column => column.name === name)];
    const depths = of("depth"), times = of("device_ns"), names = of("name");
    return depths.map((depth, row) => depths[row + 1] === depth + 1 && times[row + 1] === times[row] && !names[row].startsWith("nn.Module: "));
  };
  // How deep each row stands among those that are shown.
  const levelsOf = (depths, isHidden) => {
    const shown = [];
    return depths.map((depth, row) => {
      const level = depth ? shown[depth - 1] : 0;
      shown[depth] = level + (isHidden(row) ? 0 : 1);
      return level;
    });
  };

  // A table that is sorted by its heads and searched in all of its texts.
  const table = section => {
    const { columns, values } = section;
    const drawn = columns.map((column, place) => place).filter(place => columns[place].name !== "depth");
    columns.forEach((column, place) => { if (TEXTS[column.name]) values[place] = values[place].map(TEXTS[column.name]); });
    const count = values[0].length;
    const named = drawn.find(place => NAMES.has(columns[place].name)) ?? drawn.find(place => columns[place].kind === "text");
    // Where there is little room, figures follow what they are of.
    const late = place => (place === named ? 0 : TELLING.has(columns[place].name) ? 1 : columns[place].kind === "text" ? 3 : 2);
    if (matchMedia("(max-width: 40rem)").matches && named !== undefined) drawn.sort((one, other) => late(one) - late(other) || one - other);
    const texts = columns.map((column, place) => (column.kind === "text" ? place : -1)).filter(place => place >= 0);
    const searched = Array.from({ length: count }, (_, row) => texts.map(place => values[place][row]).join("\n").toLowerCase());
    const numbers = columns.findIndex(column => column.name === "step");
    const depth = columns.findIndex(column => column.name === "depth");
    const passed = depth >= 0 ? passedOn(section) : [];
    let folded = passed.includes(true);
    let order = Array.from({ length: count }, (_, row) => row);
    let most = STEP, sorted = -1, down = true, wanted = "";

    const box = make("div");
    const tools = make("div", undefined, "tools");
    const label = make("label", "");
    const input = make("input");
    input.type = "search";
    input.placeholder = "search";
    input.setAttribute("aria-label", `search in ${section.title}`);
    label.append(input);
    const told = make("span");
    if (texts.length && count > 5) tools.append(label);
    tools.append(told);
    if (folded) {
      const fold = make("label", undefined, "fold"), all = make("input");
      all.type = "checkbox";
      all.addEventListener("change", () => { folded = !all.checked; fill(); });
      fold.append(all, "calls that only pass on to one other, too");
      tools.append(fold);
    }
    const wide = make("div", undefined, "wide");
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", section.title);
    const body = make("tbody");
    const whole = make("table");
    const head = make("tr");
    const heads = drawn.map(place => {
      const column = columns[place];
      const cell = make("th", undefined, column.kind !== "text" ? "figure" : place === named ? "named" : "");
      cell.scope = "col";
      const button = make("button", column.label);
      button.type = "button";
      button.addEventListener("click", () => {
        down = sorted === place ? !down : column.kind !== "text";
        sorted = place;
        sort();
        fill();
      });
      cell.append(button);
      head.append(cell);
      return cell;
    });
    const more = make("button", "more rows");
    more.type = "button";
    more.addEventListener("click", () => { most *= 4; fill(); });
    const top = make("thead");
    top.append(head);
    whole.append(top, body);
    wide.append(whole);
    box.append(tools, wide, more);

    const sort = () => {
      const column = values[sorted];
      const sign = down ? -1 : 1;
      order.sort((one, other) => {
        const a = column[one], b = column[other];
        if (a === null || b === null) return (a === null) - (b === null) || one - other;
        return (a < b ? -sign : a > b ? sign : one - other);
      });
      heads.forEach((cell, at) => {
        if (drawn[at] === sorted) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
    };
    const rowOf = row => {
      const line = make("tr");
      if (numbers >= 0 && values[numbers][row] < 0) line.className = "whole";
      drawn.forEach(place => {
        const column = columns[place];
        const value = values[place][row];
        if (column.kind === "text") {
          const cell = make("td", undefined, `text${value.length > 40 ? " long" : ""}${place !== named ? "" : depth >= 0 ? " named deep" : " named"}`);
          const inside = make("span", value);
          if (depth >= 0 && sorted < 0 && !wanted) inside.style.setProperty("--level", Math.min(levels[row], 24));
          cell.append(inside);
          cell.title = value;
          if (value.length > 60) cell.addEventListener("click", () => cell.classList.toggle("open"));
          line.append(cell);
          return;
        }
        const isStep = column.name === "step" || column.name === "stream" || column.name === "device";
        const text = isStep && value === -1 ? (column.name === "step" ? "all" : column.name === "stream" ? "device" : "host") : written(value, column.kind);
        const cell = make("td", text, `figure ${column.kind}`);
        if (column.kind === "share" && value !== null) cell.style.setProperty("--part", `${Math.max(0, Math.min(1, value)) * 100}%`);
        line.append(cell);
      });
      return line;
    };
    let levels = [];
    const fill = () => {
      const isTree = sorted < 0 && !wanted;
      const found = order.filter(row => (!wanted || searched[row].includes(wanted)) && !(isTree && folded && passed[row]));
      if (depth >= 0 && isTree) levels = levelsOf(values[depth], row => folded && passed[row]);
      body.replaceChildren(...found.slice(0, most).map(rowOf));
      more.hidden = found.length <= most;
      const shown = Math.min(found.length, most);
      const cut = section.of > count ? `; the first ${count.toLocaleString("en")} of ${section.of.toLocaleString("en")} are on this page, all in ${section.table}.csv` : "";
      told.textContent = `${shown.toLocaleString("en")} of ${found.length.toLocaleString("en")} rows${cut}`;
    };
    input.addEventListener("input", () => { wanted = input.value.toLowerCase(); most = STEP; fill(); });
    fill();
    return box;
  };

  // The parts of the span of each rank, or of each step where there is one rank.
  const PARTS = [["compute_ns", "compute", "compute"], ["exposed_communication_ns", "communication", "exposed communication"], ["exposed_memory_ns", "copies", "copies"], ["idle_ns", "idle", "idle"]];
  const bars = section => {
    const of = name => section.values[section.columns.findIndex(column => column.name === name)];
    const ranks = of("rank"), steps = of("step") || of("rank").map(() => -1), spans = of("span_ns");
    const single = new Set(ranks).size === 1;
    const rows = ranks.map((_, row) => row).filter(row => single || steps[row] < 0);
    const compared = rows.filter(row => !single || rows.length === 1 || steps[row] >= 0);
    const longest = compared.reduce((most, row) => Math.max(most, spans[row]), 1);
    const box = make("div");
    const legend = make("p", undefined, "legend");
    for (const [, colour, word] of PARTS) {
      const entry = make("span");
      entry.append(make("i", undefined, colour), word);
      legend.append(entry);
    }
    const grid = make("div", undefined, "bars");
    const draw = row => {
      const all = single && steps[row] < 0 && rows.length > 1;
      const bar = make("span", undefined, "bar");
      const scale = all ? spans[row] || 1 : longest;
      for (const [name, colour, word] of PARTS) {
        const part = make("i", undefined, colour);
        part.style.width = `${of(name)[row] / scale * 100}%`;
        part.title = `${word}: ${WRITE.time(of(name)[row])}`;
        bar.append(part);
      }
      grid.append(make("span", all ? "all" : single && steps[row] >= 0 ? `step ${steps[row]}` : `rank ${ranks[row]}`), bar, make("span", WRITE.time(spans[row]), "time"));
    };
    let shown = 0;
    const more = make("button", single ? "more steps" : "more ranks");
    more.type = "button";
    const fill = () => {
      const next = rows.slice(shown, shown ? shown * 4 : BARS);
      next.forEach(draw);
      shown += next.length;
      more.hidden = shown >= rows.length;
    };
    more.addEventListener("click", fill);
    fill();
    box.append(legend, grid, more);
    return box;
  };

  // Lines over time: what stands in queues, what memory is in use.
  const lines = (points, groupName, what, names, write) => {
    const box = make("div");
    const groups = new Map();
    (points.time_ns || []).forEach((_, row) => {
      const key = `${points.rank[row]}\n${points[groupName][row]}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    });
    const heights = new Map([...groups].map(([key, rows]) => [key, Math.max(...names.flatMap(name => rows.map(row => points[name][row] || 0)), 1)]));
    const highestFirst = [...groups].sort(([one], [other]) => heights.get(other) - heights.get(one));
    if (highestFirst.length > LINES) box.append(make("p", `The ${LINES} highest of ${highestFirst.length}:`, "faint"));
    for (const [key, rows] of highestFirst.slice(0, LINES)) {
      const [rank, number] = key.split("\n");
      const first = points.time_ns[rows[0]], last = points.time_ns[rows[rows.length - 1]];
      const highest = heights.get(key);
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", "0 0 1000 100");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("role", "img");
      names.forEach((name, place) => {
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        let before = null;
        const steps = rows.map(row => {
          const x = ((points.time_ns[row] - first) / (last - first || 1) * 1000).toFixed(1);
          const y = (96 - (points[name][row] || 0) / highest * 92).toFixed(1);
          const drawn = before === null ? `M${x} ${y}` : `H${x}V${y}`;
          before = y;
          return drawn;
        });
        path.setAttribute("d", steps.join(""));
        if (place) path.setAttribute("class", "second");
        svg.append(path);
      });
      const caption = `rank ${rank}, ${number === "-1" ? "host" : `${groupName} ${number}`}: ${what}, at most ${write(highest)}, over ${WRITE.time(last - first)}`;
      svg.setAttribute("aria-label", caption);
      const figure = make("figure"), told = make("figcaption", caption);
      if (names.length > 1) names.forEach((name, place) => {
        const key = make("span", undefined, "key");
        key.append(make("i", undefined, place ? "communication" : "compute"), name.replace("_bytes", ""));
        told.append(key);
      });
      figure.append(svg, told);
      box.append(figure);
    }
    return box;
  };

  // Streams of each rank over the step, one below the other.
  const COLOURS = { compute: "compute", communication: "communication", copy: "copies", host: "host" };
  const NS = "http://www.w3.org/2000/svg";
  const waterfall = section => {
    const of = name => section.values[section.columns.findIndex(column => column.name === name)];
    const ranks = of("rank"), lanes = of("lane"), starts = of("start_ns"), ends = of("end_ns");
    const names = of("operation"), critical = of("is_critical");
    const last = Math.max(...ends, 1);
    const rows = new Map();
    ranks.forEach((rank, row) => {
      const key = `${rank}\n${lanes[row]}`;
      if (!rows.has(key)) rows.set(key, []);
      rows.get(key).push(row);
    });
    const several = new Set(ranks).size > 1;
    const grid = make("div", undefined, "bars falls");
    for (const [key, mine] of rows) {
      const [rank, lane] = key.split("\n");
      const svg = document.createElementNS(NS, "svg");
      svg.setAttribute("viewBox", "0 0 1000 10");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", `${lane} of rank ${rank}: ${mine.length} spans`);
      let busy = 0;
      for (const row of mine) {
        const box = document.createElementNS(NS, "rect");
        box.setAttribute("x", (starts[row] / last * 1000).toFixed(2));
        box.setAttribute("width", Math.max((ends[row] - starts[row]) / last * 1000, 0.15).toFixed(2));
        box.setAttribute("height", "10");
        box.setAttribute("class", `${COLOURS[lane.split(" ")[0]] || "host"}${critical[row] ? " critical" : ""}`);
        const told = document.createElementNS(NS, "title");
        told.textContent = `${names[row]}: ${WRITE.time(ends[row] - starts[row])} from ${WRITE.time(starts[row])}`;
        box.append(told);
        svg.append(box);
        busy += ends[row] - starts[row];
      }
      grid.append(make("span", several ? `rank ${rank}, ${lane}` : lane), svg, make("span", WRITE.time(busy), "time"));
    }
    return grid;
  };

  for (const section of data.sections) {
    const part = make("section");
    part.id = section.table;
    part.append(make("h2", section.title), make("p", section.note, "faint"));
    if (section.table === "breakdown") part.append(bars(section));
    if (section.table === "queues") part.append(lines(data.queue_points, "stream", "launched and not started", ["length"], WRITE.count));
    if (section.table === "memory") part.append(lines(data.memory_points, "device", "memory given out, and held", ["allocated_bytes", "reserved_bytes"], WRITE.bytes));
    part.append(section.table === "spans" ? waterfall(section) : table(section));
    main.append(part);
  }
})();
