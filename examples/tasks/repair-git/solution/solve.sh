#!/bin/sh
git reset --hard "$(git rev-parse 'HEAD@{1}')"
