// What every page gets: keys, charts that can be walked along, tokens that can be pointed at, and news of a run that goes on.
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
