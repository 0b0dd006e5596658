//! Colours, if the output is a terminal.

/// Wraps text in a terminal's colour codes, or leaves it unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    is_on: bool,
}

impl Style {
    /// On at a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
    pub fn new(is_tty: bool) -> Self {
        let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { is_on: is_tty && !is_refused }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }

    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub fn warning(self, text: &str) -> String {
        self.paint("33", text)
    }

    pub fn error(self, text: &str) -> String {
        self.paint("31;1", text)
    }
}
