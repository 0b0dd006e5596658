//! Statements: which sources they concern, how each is told, and how their answers become one.
