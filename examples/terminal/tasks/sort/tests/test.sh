#!/bin/bash
# b has the lines of a in order
[ "$(tr "\n" " " < b)" = "1 2 3 " ]
