#!/bin/sh
{
    echo service,events,errors
    cat logs/*.log | awk '{ events[$2]++; if ($3 == "ERROR") errors[$2]++ }
        END { for (name in events) print name "," events[name] "," errors[name] + 0 }' | sort
} > report.csv
