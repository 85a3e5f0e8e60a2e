#!/bin/sh
# The agent wrote the repository's configuration, so only commands that start no program from it are used.
git="git -c safe.directory=/app -c core.fsmonitor=false -C /app"
wanted=9c5ef9026e20690d4765f636750f0bf3e32285da
passed=1
[ "$($git rev-parse refs/heads/main)" = $wanted ] || { echo "main is another commit"; passed=0; }
[ "$($git symbolic-ref HEAD)" = refs/heads/main ] || { echo "another branch is checked out"; passed=0; }
$git fsck || passed=0
[ "$(cat /app/prices.txt)" = "$(printf 'apple 3\npear 4')" ] || { echo "prices.txt differs"; passed=0; }
[ "$(cat /app/README)" = "A small shop." ] || { echo "README differs"; passed=0; }
[ "$(ls -A /app)" = "$(printf '.git\nREADME\nprices.txt')" ] || { echo "there are other files"; passed=0; }
echo $passed > /logs/verifier/reward.txt
