"""The verifier's own audit: rewarded answers are changed into wrong ones and equal ones, and judged again."""
