# Always the same commits: author, dates and content are fixed.
set -e
export GIT_AUTHOR_NAME=Ada GIT_AUTHOR_EMAIL=ada@example.org GIT_COMMITTER_NAME=Ada GIT_COMMITTER_EMAIL=ada@example.org
export GIT_AUTHOR_DATE=2026-03-01T10:00:00Z GIT_COMMITTER_DATE=2026-03-01T10:00:00Z
git init -q -b main .
echo "A small shop." > README
git add .
git commit -q -m "Begin"
printf 'apple 3\npear 4\n' > prices.txt
git add .
git commit -q -m "Add the price list"
git reset -q --hard HEAD~1
