//! The line editor at a terminal: history in a file, completion of commands.

use std::path::PathBuf;

use anyhow::Context as _;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Helper};

use super::command::COMMANDS;

/// The input of the user.
pub(super) enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D.
    End,
}

/// The editor. Its history is saved when it is dropped.
pub(super) struct Editor {
    editor: rustyline::Editor<Commands, FileHistory>,
    history: Option<PathBuf>,
}

/// Completes and hints at names of commands.
struct Commands;

impl Completer for Commands {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let before = line.get(..position).unwrap_or(line);
        let is_help = before.starts_with("help ");
        let start = if is_help { "help ".len() } else { 0 };
        let word = before.get(start..).unwrap_or_default();
        let matching = COMMANDS.iter().filter(|usage| usage.name.starts_with(word));
        Ok((start, matching.map(|usage| format!("{} ", usage.name)).collect()))
    }
}

impl Hinter for Commands {
    type Hint = String;

    /// The arguments of a command, shown after its name was typed.
    fn hint(&self, line: &str, position: usize, _: &rustyline::Context<'_>) -> Option<String> {
        let name = line.strip_suffix(' ').filter(|_| position == line.len())?;
        let usage = COMMANDS.iter().find(|usage| usage.name == name)?;
        (!usage.arguments.is_empty()).then(|| usage.arguments.to_owned())
    }
}

impl Highlighter for Commands {
    fn highlight_hint<'h>(&self, hint: &'h str) -> std::borrow::Cow<'h, str> {
        format!("\x1b[2m{hint}\x1b[0m").into()
    }
}

impl Validator for Commands {}
impl Helper for Commands {}

impl Editor {
    pub(super) fn new() -> anyhow::Result<Self> {
        let config = Config::builder()
            .history_ignore_space(true)
            .auto_add_history(true)
            .max_history_size(1_000)
            .context("cannot configure the line editor")?
            .build();
        let mut editor =
            rustyline::Editor::with_config(config).context("cannot use the terminal")?;
        editor.set_helper(Some(Commands));
        let history = std::env::home_dir().map(|home| home.join(".orthodrome_history"));
        if let Some(path) = &history {
            // At the first start there is no history; an unreadable one does not prevent the shell
            // from opening.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    pub(super) fn read(&mut self, prompt: &str) -> anyhow::Result<Line> {
        match self.editor.readline(prompt) {
            Ok(line) => Ok(Line::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error).context("cannot read from the terminal"),
        }
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        if let Some(path) = &self.history
            && let Err(error) = self.editor.save_history(path)
        {
            note!("warning: cannot save the command history to {}: {error}", path.display());
        }
    }
}
