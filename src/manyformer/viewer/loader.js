"use strict";

/** The bytes of deflated data in base64. */
function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function runProgram() {
  const program = document.createElement("script");
  program.textContent = new TextDecoder().decode(await inflate(document.getElementById("program").textContent));
  document.body.append(program);
}

if ("DecompressionStream" in window) runProgram();
else document.body.append("This page needs a browser of 2023 or newer.");
