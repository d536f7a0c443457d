"""The policy as equations on tables, in pure Python (the paper's sections 3.1 and 3.3 to 3.5).

| module     | what                                                       | paper             |
| ---------- | ---------------------------------------------------------- | ----------------- |
| `actions`  | the ladder of levels, and what a token costs at each       | m of Equation 1   |
| `evidence` | what calibration measured about each bucket                | D and V           |
| `envelope` | failures made monotone                                     | Equation 5        |
| `floors`   | the least level of each bucket                             | Equation 6        |
| `path`     | upgrades from the floors to all HIGH, candidates and costs | Equations 7 and 1 |
| `reserve`  | budget kept for what is still to come                      | Equation 9        |
| `policy`   | everything packed in a file                                | Algorithm 1       |
| `lookup`   | one decoded token's levels                                 | Algorithm 2       |

Calibration measures the evidence, `pask.calibration`. The decode side has tags for buckets and the
prompt side labels; both follow the same equations.
"""
