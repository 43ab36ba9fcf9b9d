"use strict";
// Timelines, which are drawn on a canvas at any zoom, and flame graphs, whose frames can fill the width.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const timeText = (ns, digits = 4) => {
    const units = ["ns", "us", "ms", "s"];
    let unit = 0, value = ns;
    while (Math.abs(value) >= 1000 && unit < 3) { value /= 1000; unit += 1; }
    return `${Number(value.toPrecision(digits)).toLocaleString("en")} ${units[unit]}`;
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const LANE = 22, TOP = 22, LEAST = 0.7;
  const timeline = (id, chart) => {
    const box = document.getElementById(id).querySelector(".timeline");
    const unit = chart.unit_ns, whole = Math.max(chart.length_ns / unit, 1);
    const lanes = chart.lanes.map(lane => {
      const count = lane.gaps.length;
      const starts = new Float64Array(count), ends = new Float64Array(count), reach = new Float64Array(count);
      const critical = new Uint8Array(count);
      let last = 0, furthest = 0;
      for (let row = 0; row < count; row += 1) {
        starts[row] = last + lane.gaps[row];
        last = ends[row] = starts[row] + lane.lengths[row];
        reach[row] = furthest = Math.max(furthest, last);
      }
      lane.critical.forEach(row => { critical[row] = 1; });
      return { label: lane.label, styles: lane.styles, codes: lane.codes, starts, ends, reach, critical };
    });
    const text = (lane, row) => data.texts[lanes[lane].codes[row]];
    let from = 0, to = whole, lane = 0, row = -1, colours = {};

    const tools = make("div", undefined, "tools");
    const view = make("div", undefined, "view");
    const canvas = make("canvas");
    const status = make("p", undefined, "small");
    const hint = make("p", "Drag or use the arrow keys to move, Ctrl and the wheel or + and - to zoom, up and down to change the lane, N and P to go to the next and previous span.", "faint small hint");
    hint.id = `${id}-hint`;
    status.setAttribute("role", "status");
    view.tabIndex = 0;
    view.setAttribute("role", "application");
    view.setAttribute("aria-label", box.dataset.title);
    view.setAttribute("aria-describedby", hint.id);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${box.dataset.title}: ${lanes.map(each => `${each.label}, ${each.starts.length} spans`).join("; ")}`);
    view.append(canvas);
    box.prepend(tools, view, status, hint);
    box.classList.add("live");
    const paper = canvas.getContext("2d");
    const longest = Math.max(...lanes.map(each => each.label.length));
    let width = 0, gutter = 0, scale = 1;  // of the last drawing: reading them from the page is slow
    const measure = () => {
      width = view.clientWidth;
      gutter = Math.min(longest * 6.6 + 10, 170, width * 0.26);
      scale = (width - gutter - 4) / (to - from);
    };
    const at = moment => gutter + (moment - from) * scale;
    const firstOf = each => {
      let low = 0, high = each.reach.length;
      while (low < high) { const middle = (low + high) >> 1; if (each.reach[middle] < from) low = middle + 1; else high = middle; }
      return low;
    };
    const clipped = (words, width) => {
      const most = Math.floor(width / 6.4);
      return words.length <= most ? words : most > 2 ? `${words.slice(0, most - 1)}…` : "";
    };
    const ticks = () => {
      const step = (to - from) / Math.max(2, Math.floor((width - gutter) / 110));
      const size = 10 ** Math.floor(Math.log10(step));
      const every = [1, 2, 5, 10].map(factor => factor * size).find(value => value >= step);
      const digits = Math.max(4, Math.ceil(Math.log10(to / every)) + 1);
      for (let value = Math.ceil(from / every) * every; value <= to; value += every) {
        paper.fillStyle = colours.line;
        paper.fillRect(at(value), TOP - 4, 1, lanes.length * LANE + 4);
        paper.fillStyle = colours.faint;
        paper.textAlign = at(value) > width - 40 ? "right" : "center";
        paper.fillText(timeText(value * unit, digits), at(value), TOP - 9);
      }
    };
    const paint = (each, y, isCritical) => {
      const { starts, ends, critical } = each;
      let painted = -Infinity, style = "";  // the moment up to which the lane is painted
      paper.globalAlpha = isCritical ? 1 : 0.5;
      for (let span = firstOf(each); span < starts.length && starts[span] <= to; span += 1) {
        if (ends[span] <= painted || critical[span] !== isCritical) continue;
        const x = Math.max(at(starts[span]), gutter), end = Math.min(Math.max(at(ends[span]), x + LEAST), width);
        if (end <= gutter) continue;
        painted = from + (end - gutter) / scale;
        const wanted = chart.styles[each.styles.length > 1 ? each.styles[span] : each.styles[0]];
        if (wanted !== style) paper.fillStyle = colours[style = wanted];
        paper.fillRect(x, y + 2, end - x, LANE - 5);
        const words = end - x > 26 ? clipped(data.texts[each.codes[span]], end - x - 6) : "";
        if (words) {
          paper.globalAlpha = 1;
          paper.fillStyle = isCritical && style !== "host" ? colours.ground : colours.ink;
          paper.fillText(words, x + 3, y + 14);
          paper.globalAlpha = isCritical ? 1 : 0.5;
          style = "";
        }
        if (isCritical) { paper.fillStyle = colours.ink; paper.fillRect(x, y + LANE - 4, end - x, 2); style = ""; }
      }
      paper.globalAlpha = 1;
    };
    const draw = () => {
      measure();
      const height = TOP + lanes.length * LANE + 2, ratio = devicePixelRatio || 1;
      if (!width) return;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      paper.setTransform(ratio, 0, 0, ratio, 0, 0);
      paper.font = "12px system-ui, sans-serif";
      ticks();
      lanes.forEach((each, number) => {
        const y = TOP + number * LANE;
        paper.fillStyle = number === lane ? colours.ink : colours.faint;
        paper.textAlign = "left";
        const most = Math.floor((gutter - 6) / 6.4), label = each.label;
        paper.fillText(label.length <= most ? label : `${label.slice(0, most - 5)}…${label.slice(-4)}`, 2, y + 14);
        paper.textAlign = "left";
        paint(each, y, 0);
        paint(each, y, 1);
      });
      if (row >= 0) {
        const each = lanes[lane], x = Math.max(at(each.starts[row]), gutter), end = Math.min(Math.max(at(each.ends[row]), x + 2), width);
        paper.strokeStyle = colours.ink;
        paper.lineWidth = 2;
        if (end >= gutter && x <= width) paper.strokeRect(x, TOP + lane * LANE + 1, end - x, LANE - 3);
      }
    };
    let waiting = 0;
    const redraw = () => { if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; draw(); }); };
    const restyle = () => { ["compute", "communication", "copies", "ink", "faint", "line", "ground"].forEach(name => { colours[name] = colour(name); }); colours.host = colour("idle"); redraw(); };
    const show = (start, end) => {
      const length = Math.min(Math.max(end - start, 8), whole);
      from = Math.min(Math.max(start, 0), whole - length);
      to = from + length;
      redraw();
    };
    const zoom = (factor, around = (from + to) / 2) => show(around - (around - from) * factor, around + (to - around) * factor);
    const move = share => show(from + (to - from) * share, to + (to - from) * share);
    const select = (number, span, isSeen) => {
      lane = number;
      row = span;
      if (row < 0) { status.textContent = `${lanes[lane].label}: ${lanes[lane].starts.length.toLocaleString("en")} spans`; redraw(); return; }
      const each = lanes[lane], start = each.starts[row], end = each.ends[row];
      const path = each.critical[row] ? ", on the critical path" : "";
      status.textContent = `${each.label}: ${text(lane, row)}, ${timeText((end - start) * unit)} from ${timeText(start * unit, 7)}${path}`;
      if (isSeen && (start < from || end > to || (end - start) * scale < 3)) { const margin = Math.max((end - start) * 4, 20); show(start - margin, end + margin); }
      redraw();
    };
    const spanAt = event => {
      const bounds = canvas.getBoundingClientRect();
      const number = Math.floor((event.clientY - bounds.top - TOP) / LANE), moment = from + (event.clientX - bounds.left - gutter) / scale;
      if (!lanes[number]) return null;
      const each = lanes[number], slack = 2 / scale;
      let best = -1;
      for (let span = firstOf(each); span < each.starts.length && each.starts[span] <= moment + slack; span += 1) if (each.ends[span] >= moment - slack && (best < 0 || each.ends[span] >= moment)) best = span;
      return [number, best];
    };
    const button = (words, label, act) => {
      const control = make("button", words);
      control.type = "button";
      control.setAttribute("aria-label", label);
      control.addEventListener("click", act);
      tools.append(control);
    };
    button("+", "zoom in", () => zoom(0.5));
    button("−", "zoom out", () => zoom(2));
    button("◀", "earlier", () => move(-0.4));
    button("▶", "later", () => move(0.4));
    button("whole", "show the whole timeline", () => show(0, whole));
    const find = make("input"), label = make("label", "find an operation (Enter: next)");
    find.type = "search";
    find.addEventListener("keydown", event => {
      const wanted = find.value.trim().toLowerCase();
      if (event.key !== "Enter" || !wanted) return;
      const total = lanes.reduce((sum, each) => sum + each.starts.length, 0);
      let number = lane, span = row;
      for (let seen = 0; seen < total + lanes.length; seen += 1) {
        span += 1;
        if (span >= lanes[number].starts.length) { number = (number + 1) % lanes.length; span = -1; continue; }
        if (text(number, span).toLowerCase().includes(wanted)) { select(number, span, true); return; }
      }
      status.textContent = `no operation contains ${find.value.trim()}`;
    });
    label.append(find);
    tools.append(label);

    let grip = null;
    canvas.addEventListener("pointerdown", event => { grip = { x: event.clientX, from, to, isMoved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", event => {
      if (!grip) { const under = spanAt(event); canvas.title = under && under[1] >= 0 ? `${text(...under)}: ${timeText((lanes[under[0]].ends[under[1]] - lanes[under[0]].starts[under[1]]) * unit)}` : ""; return; }
      const moved = (grip.x - event.clientX) / scale;
      if (Math.abs(event.clientX - grip.x) > 3) grip.isMoved = true;
      if (grip.isMoved) show(grip.from + moved, grip.to + moved);
    });
    canvas.addEventListener("pointerup", event => { const under = spanAt(event); if (grip && !grip.isMoved && under) select(under[0], under[1], false); grip = null; });
    canvas.addEventListener("dblclick", event => { const under = spanAt(event); if (under && under[1] >= 0) { select(...under, false); const each = lanes[lane]; show(each.starts[row], each.ends[row]); } });
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 250), from + (event.clientX - canvas.getBoundingClientRect().left - gutter) / scale);
      else move(event.deltaX / 800);
    }, { passive: false });
    const keys = {
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: () => show(0, whole),
      ArrowUp: () => select((lane + lanes.length - 1) % lanes.length, -1, false), ArrowDown: () => select((lane + 1) % lanes.length, -1, false),
      n: () => select(lane, row < 0 ? Math.min(firstOf(lanes[lane]), lanes[lane].starts.length - 1) : Math.min(row + 1, lanes[lane].starts.length - 1), true), p: () => select(lane, Math.max(row - 1, 0), true),
    };
    view.addEventListener("keydown", event => {
      const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    const follow = () => {
      const parts = decodeURIComponent(location.hash.slice(1)).split("/");
      if (parts[0] !== id || !lanes[parts[1]] || !(parts[2] < lanes[parts[1]].starts.length)) return;
      select(Number(parts[1]), Number(parts[2]), false);
      const each = lanes[lane], length = each.ends[row] - each.starts[row];
      show(each.starts[row] - 2 * length - 20, each.ends[row] + 2 * length + 20);
      box.scrollIntoView({ block: "center" });
      view.focus({ preventScroll: true });
    };
    addEventListener("hashchange", follow);
    dark.addEventListener("change", restyle);
    new ResizeObserver(redraw).observe(view);
    restyle();
    select(0, -1, false);
    follow();
  };

  const flame = box => {
    const frames = [...box.querySelectorAll(".frame")].map(element => ({ element, start: Number(element.dataset.start), width: Number(element.dataset.width), depth: Number(element.getAttribute("y")), title: element.querySelector("title").textContent }));
    frames.sort((one, other) => one.depth - other.depth || one.start - other.start);
    const status = make("p", "Arrow keys choose a frame, Enter or a click zooms to it, Escape shows all.", "faint small");
    status.setAttribute("role", "status");
    box.after(status);
    let chosen = frames[0];
    const inside = (frame, outer) => frame.start >= outer.start - 1e-6 && frame.start + frame.width <= outer.start + outer.width + 1e-6;
    const zoom = to => frames.forEach(frame => {
      const isAround = inside(to, frame) && frame.depth < to.depth;
      const start = isAround ? 0 : (frame.start - to.start) / to.width, width = isAround ? 1 : frame.width / to.width;
      frame.element.style.display = start >= 1 - 1e-6 || start + width <= 1e-6 || (!isAround && !inside(frame, to)) ? "none" : "";
      frame.element.setAttribute("x", `${start * 100}%`);
      frame.element.setAttribute("width", `${width * 100}%`);
      if (width > 0.01 && !frame.element.querySelector("text")) {
        const words = document.createElementNS(frame.element.namespaceURI, "text");
        words.setAttribute("x", "4");
        words.setAttribute("y", "13");
        words.textContent = frame.title.replace(/: [^:]*$/, "");
        frame.element.append(words);
      }
    });
    const choose = frame => {
      if (!frame) return;
      chosen.element.classList.remove("chosen");
      chosen = frame;
      chosen.element.classList.add("chosen");
      status.textContent = chosen.title;
    };
    const level = depth => frames.filter(frame => frame.depth === depth);
    const beside = step => { const row = level(chosen.depth); choose(row[row.indexOf(chosen) + step]); };
    const height = frames.length > 1 ? Math.min(...frames.map(frame => frame.depth).filter(depth => depth > 0)) : 0;
    const keys = {
      ArrowLeft: () => beside(-1), ArrowRight: () => beside(1),
      ArrowUp: () => choose(level(chosen.depth - height).find(frame => inside(chosen, frame))), ArrowDown: () => choose(level(chosen.depth + height).find(frame => inside(frame, chosen))),
      Enter: () => zoom(chosen), Escape: () => zoom({ start: 0, width: 1, depth: -1 }),
    };
    box.addEventListener("keydown", event => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
    box.addEventListener("click", event => {
      const frame = frames.find(each => each.element === event.target.closest(".frame"));
      if (!frame) return;
      const isWhole = frame === chosen && frame.element.getAttribute("width") === "100%";
      choose(frame);
      zoom(isWhole ? { start: 0, width: 1, depth: -1 } : frame);
    });
  };

  Object.entries(data.charts).forEach(([id, chart]) => {
    if (chart.kind === "timeline") timeline(id, chart);
    else flame(document.getElementById(id).querySelector(".flame"));
  });
})();
