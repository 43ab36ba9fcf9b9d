"use strict";
// Sorting, searching, filters and more rows of the tables of a page, which are in its HTML with their first rows.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const FIRST_ROWS = 50;
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const labelled = (title, control) => {
    const label = make("label", title);
    label.append(control);
    return label;
  };
  const number = count => count.toLocaleString("en");

  const enhance = (name, table) => {
    const box = document.getElementById(name);
    const element = box.querySelector("table"), count = box.querySelector(".row-count");
    const head = element.tHead.rows[0], body = element.tBodies[0];
    const text = (column, row) => data.texts[column.codes[row]];
    const value = (column, row) => (column.values ? column.values[row] : text(column, row));
    const classOf = column => [...new Set([column.values ? "figure" : "text", column.kind, column.long ? "long" : "", column.named ? "named" : ""])].join(" ").trim();
    const order = Array.from({ length: table.rows }, (_, row) => row);
    let choice = table.choices && table.choices[0], folds = Boolean(table.folded);
    let most = FIRST_ROWS, sorted = "", isDown = true, wanted = "", searched = null;
    const filters = new Map();
    const drawn = () => table.columns.filter(column => !column.choice || column.choice === choice);

    const sort = () => {
      const column = drawn().find(each => each.title === sorted);
      if (!column) return;
      const sign = isDown ? -1 : 1;
      order.sort((one, other) => {
        const a = value(column, one), b = value(column, other);
        if (a === null || b === null) return (a === null) - (b === null) || one - other;
        return a < b ? -sign : a > b ? sign : one - other;
      });
    };
    const fillHead = () => head.replaceChildren(...drawn().map(column => {
      const cell = make("th", undefined, classOf(column));
      const button = make("button", column.title);
      cell.scope = "col";
      button.type = "button";
      if (column.title === sorted) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      button.addEventListener("click", () => {
        isDown = sorted === column.title ? !isDown : Boolean(column.values);
        sorted = column.title;
        sort();
        fillHead();
        fill();
      });
      cell.append(button);
      return cell;
    }));
    const rowOf = (row, levels) => {
      const line = make("tr", undefined, table.strong && table.strong[row] ? "strong" : "");
      drawn().forEach((column, place) => {
        const words = text(column, row);
        const cell = make("td", undefined, classOf(column) + (column.tones ? ` ${column.tones[row]}` : ""));
        let inside = cell;
        if (!column.values) {
          inside = make("span");
          if (levels && !place) inside.style.setProperty("--level", levels[row]);
          cell.append(inside);
        } else if (column.kind === "share" && column.values[row] !== null) {
          cell.style.setProperty("--part", `${Math.max(0, Math.min(1, column.values[row])) * 100}%`);
        }
        if (column.links && column.links[row]) {
          const link = make("a", words);
          link.href = `#${column.links[row]}`;
          inside.append(link);
        } else inside.append(words);
        line.append(cell);
      });
      return line;
    };
    const fill = () => {
      const isFiltered = wanted || filters.size > 0;
      if (wanted && !searched) searched = Array.from({ length: table.rows }, (_, row) => table.columns.filter(column => !column.values).map(column => text(column, row)).join("\n").toLowerCase());
      const isTree = table.levels && !sorted && !isFiltered;
      const levels = isTree ? (folds || !table.unfolded_levels ? table.levels : table.unfolded_levels) : null;
      const found = order.filter(row => (!wanted || searched[row].includes(wanted)) && !(isTree && folds && table.folded[row])
        && [...filters].every(([column, words]) => text(column, row) === words));
      body.replaceChildren(...found.slice(0, most).map(row => rowOf(row, levels)));
      more.hidden = found.length <= most;
      const of = isFiltered ? `, of ${number(table.rows)}` : "";
      const cut = table.of > table.rows ? `; the first ${number(table.rows)} of ${number(table.of)} rows are on this page${table.file ? `; ${table.file} has all` : ""}` : "";
      count.textContent = found.length > FIRST_ROWS || of || cut ? `${number(Math.min(found.length, most))} of ${number(found.length)} rows${of}${cut}` : "";
    };
    const restart = () => { most = FIRST_ROWS; fill(); };

    const tools = make("div", undefined, "tools");
    const select = (title, words, every, chosen) => {
      const control = make("select");
      (every ? ["all", ...words] : words).forEach((word, place) => {
        const option = make("option", word.length > 90 ? `${word.slice(0, 89)}…` : word);
        option.value = every && !place ? "" : String(every ? place - 1 : place);
        control.append(option);
      });
      control.addEventListener("change", () => { chosen(control.value === "" ? null : words[Number(control.value)]); restart(); });
      tools.append(labelled(title, control));
    };
    if (table.rows > 5 && table.columns.some(column => !column.values)) {
      const input = make("input");
      input.type = "search";
      input.autocomplete = "off";
      input.spellcheck = false;
      input.addEventListener("input", () => { wanted = input.value.trim().toLowerCase(); restart(); });
      tools.append(labelled("search", input));
    }
    for (const column of table.columns.filter(each => each.filter && table.rows > 5)) {
      const words = [...new Set(column.codes)].map(code => data.texts[code]).sort((one, other) => one.localeCompare(other));
      if (words.length > 1 && words.length < table.rows) select(column.title, words, true, word => { if (word === null) filters.delete(column); else filters.set(column, word); });
    }
    if (table.choices && table.choices.length > 1) select(table.choice, table.choices, false, word => { choice = word; sort(); fillHead(); });
    if (table.folded) {
      const box = make("input");
      box.type = "checkbox";
      box.addEventListener("change", () => { folds = !box.checked; fill(); });
      const label = labelled("", box);
      label.className = "fold";
      label.append(table.fold);
      tools.append(label);
    }
    const more = make("button", "more rows", "more");
    more.type = "button";
    more.addEventListener("click", () => { most *= 4; fill(); });
    if (tools.childElementCount) box.prepend(tools);
    count.before(more);
    body.addEventListener("click", event => {
      const cell = event.target.closest("td.text");
      if (cell && !event.target.closest("a")) cell.classList.toggle("open");
    });
    fillHead();
    fill();
  };
  Object.entries(data.tables).forEach(([name, table]) => enhance(name, table));

  // A link may lead into blocks that are folded.
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  };
  addEventListener("hashchange", open);
  open();
  // The section that is read is marked in the navigation.
  const links = new Map([...document.querySelectorAll("nav a")].map(link => [link.hash.slice(1), link]));
  const mark = () => {
    let current = "";
    for (const section of document.querySelectorAll("main > section")) if (section.getBoundingClientRect().top < innerHeight / 3) current = section.id;
    links.forEach((link, id) => { if (id === current) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); });
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
})();
