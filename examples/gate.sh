#!/usr/bin/env bash
# A gate for continuous integration: did this change make a kernel slower?
#
#     examples/gate.sh BASELINE [CURRENT] [more options of regression_detector]
#
# The exit code is the verdict: 0 no, 1 yes, 3 too noisy to say within the budget, 4 nothing that can be compared.
# Ready jobs for GitHub Actions and GitLab: docs/ci/.
set -u
baseline=${1:?say what to compare with: a commit, a branch, a tag}
current=${2:-HEAD}
shift $(($# < 2 ? $# : 2))

regression_detector --baseline "$baseline" --current "$current" --budget "${BUDGET:-30m}" \
    --markdown comment.md --junit kernelmark.xml "$@"
verdict=$?

case $verdict in
    0) echo "no kernel got slower" ;;
    1) echo "a kernel got slower: see comment.md" ;;
    3) echo "too noisy to say; a larger BUDGET measures more pairs" ;;
    4) echo "nothing that can be compared: see comment.md" ;;
    *) echo "not measured (exit code $verdict)" ;;
esac
exit $verdict
