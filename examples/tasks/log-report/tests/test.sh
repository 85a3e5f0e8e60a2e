#!/bin/sh
# A third for the file, a third for the services and their events, and a third for their errors.
report=/app/report.csv
part() { if [ "$1" = "$2" ]; then echo 1; else echo 0; fi; }
present=0
[ -f $report ] && [ ! -L $report ] && [ "$(head -n 1 $report)" = "service,events,errors" ] && present=1
events=$(part "$(cut -d, -f1,2 /tests/expected.csv)" "$(cut -d, -f1,2 $report)")
errors=$(part "$(cut -d, -f1,3 /tests/expected.csv)" "$(cut -d, -f1,3 $report)")
diff $report /tests/expected.csv
awk "BEGIN { printf \"{\\\"present\\\": %d, \\\"events\\\": %d, \\\"errors\\\": %d, \\\"reward\\\": %.4f}\\n\", \
    $present, $events, $errors, ($present + $events + $errors) / 3 }" > /logs/verifier/reward.json
