"use strict";
// Formats bytes as format_size() and format_with_unit() of pytest_cka_memory.units do, with the same
// arithmetic, so that a page and a terminal never show two texts for the same bytes.
function rounded(figure, digits) {
  const scale = 10 ** digits;
  return `${figure < 0 ? "-" : ""}${(Math.floor(Math.abs(figure) * scale + 0.5) / scale).toFixed(digits)}`;
}

function size(bytes) {
  if (bytes === null) return "-";
  if (bytes === 0) return "0";
  if (Math.abs(bytes) < 1024)
    return `${Number.isInteger(bytes) ? bytes : Math.abs(bytes) >= 0.05 ? rounded(bytes, 1) : bytes.toPrecision(1)} B`;
  if (Math.abs(bytes) < 10240) return `${rounded(bytes / 1024, 1)} KB`;
  const figure = bytes / 1048576, most = Math.abs(figure);
  return rounded(figure, most < 9999.995 ? 2 : most < 99999.95 ? 1 : 0);
}

function sizeWithUnit(bytes) {
  const text = size(bytes);
  return bytes && /\d$/.test(text) ? `${text} MB` : text;
}
