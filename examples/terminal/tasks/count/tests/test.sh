#!/bin/bash
# the first word of b is the number of lines of a
read -r number _ < b && [ "$number" = 3 ]
