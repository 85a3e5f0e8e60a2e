// Every page has keyboard shortcuts, charts and tokens with a cursor, and live updates of a run.
import { charts } from "./charts.js";
import { keys } from "./keys.js";
import { live } from "./live.js";
import { tokens } from "./tokens.js";

function enhance() {
  charts(document);
  tokens(document);
}

enhance();
keys();
live(enhance);
