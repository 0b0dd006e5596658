//! orthodrome-eval
