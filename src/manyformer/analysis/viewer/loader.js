"use strict";

/** The bytes of deflated data in base64. */
function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Adds an element with the content that the page has compressed in the element with this id. */
async function unpack(name, id) {
  const target = document.createElement(name);
  target.textContent = new TextDecoder().decode(await inflate(document.getElementById(id).textContent));
  document.body.append(target);
}

if ("DecompressionStream" in window) unpack("style", "style").then(() => unpack("script", "program"));
else document.body.append("This page needs a browser of 2023 or newer.");
