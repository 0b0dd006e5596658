//! Reads the arguments of a command.

use bytes::Bytes;

use super::Command;
use super::messages::is_channels;
use super::number::{self, Decimal, Score};
use super::reply::{Failure, NOT_FLOAT, NOT_INTEGER, SYNTAX};
use super::table::COMMANDS;
use crate::ordered::OrdMap;
use crate::scan::is_fence;
use crate::txn::Key;

/// A key: its database and its name.
pub type KeyName = (u8, Bytes);

/// The keys of a transaction, each once, in the order in which its commands name them.
#[derive(Clone, Debug, Default)]
pub struct KeyNames {
    /// The database of names without one.
    database: u8,
    names: Vec<KeyName>,
    numbers: OrdMap<KeyName, u32>,
    bytes: usize,
    /// True if no others may be added.
    is_closed: bool,
    /// True once a key was refused.
    has_refused: bool,
}

/// Why a command cannot run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused {
    /// The error for the client.
    pub failure: Failure,
    /// True if the command cannot even be kept for later: it has a wrong number of words, or its
    /// keys exceed a bound. Other mistakes are answers of the command when it runs.
    pub is_early: bool,
}

/// A key that only scans may use, because nobody writes it.
const FENCE: Failure = Failure::new(
    "ERR a key must not end with a zero byte, `fence` and a number; scans use such keys themselves",
);

/// The most keys of one transaction, and the longest key, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyLimits {
    /// Different keys.
    pub keys_max: usize,
    /// Bytes of one key.
    pub key_bytes_max: usize,
}

impl KeyNames {
    /// The keys that a script declared, with their numbers in its batch. It has no others.
    #[must_use]
    pub fn declared(keys: &[(u32, Bytes)]) -> Self {
        let numbers = keys.iter().map(|(number, name)| ((0, name.clone()), *number));
        Self { numbers: numbers.collect(), is_closed: true, ..Self::default() }
    }

    /// Names without a database belong to this database from now on.
    pub fn select(&mut self, database: u8) {
        self.database = database;
    }

    /// The database of names without one.
    #[must_use]
    pub fn database(&self) -> u8 {
        self.database
    }

    /// The names.
    #[must_use]
    pub fn names(&self) -> &[KeyName] {
        &self.names
    }

    /// The number of bytes of all names.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of a key of the selected database.
    ///
    /// # Errors
    /// The key is too long, or there are too many.
    pub fn number(&mut self, name: &Bytes, limits: KeyLimits) -> Result<u32, Failure> {
        self.number_of(&(self.database, name.clone()), limits)
    }

    /// The number of a key.
    ///
    /// # Errors
    /// The key is too long, or there are too many.
    pub fn number_of(&mut self, key: &KeyName, limits: KeyLimits) -> Result<u32, Failure> {
        if let Some(number) = self.numbers.get(key) {
            return Ok(*number);
        }
        let KeyLimits { keys_max, key_bytes_max } = limits;
        let (_, name) = key;
        if self.is_closed {
            let part = name.get(..name.len().min(128)).unwrap_or_default();
            let shown = String::from_utf8_lossy(part);
            return Err(Failure::of(format!(
                "ERR the script did not declare the key '{shown}'; pass every key that a script \
                 uses as one of its KEYS"
            )));
        }
        self.has_refused = true;
        if name.len() > key_bytes_max {
            let have = name.len();
            let what = if is_channels(key.0) { "channel" } else { "key" };
            return Err(Failure::of(format!(
                "ERR a {what} of {have} bytes; at most {key_bytes_max} are allowed"
            )));
        }
        // Few names end like this, so few are copied.
        let digits = name.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
        let stem = name.get(..name.len() - digits).unwrap_or_default();
        if stem.ends_with(b"fence") && is_fence(&Key::from(name)) {
            return Err(FENCE);
        }
        if self.names.len() >= keys_max {
            return Err(Failure::of(format!(
                "ERR a transaction accesses at most {keys_max} different keys"
            )));
        }
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        self.names.push(key.clone());
        self.numbers.insert(key.clone(), number);
        self.bytes += name.len();
        self.has_refused = false;
        Ok(number)
    }

    /// Forgets the keys after the first `many`.
    pub fn truncate(&mut self, many: usize) {
        for key in self.names.drain(many.min(self.names.len())..) {
            self.bytes -= key.1.len();
            self.numbers.remove(&key);
        }
    }
}

/// The arguments of a command that have not been read yet.
#[derive(Debug)]
pub struct Args<'a> {
    name: &'static str,
    rest: &'a [Bytes],
    keys: &'a mut KeyNames,
    limits: KeyLimits,
}

impl<'a> Args<'a> {
    /// The command's name.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// The number of arguments left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, Failure> {
        let (first, rest) = self.rest.split_first().ok_or(SYNTAX)?;
        self.rest = rest;
        Ok(first.clone())
    }

    pub(super) fn key(&mut self) -> Result<u32, Failure> {
        let name = self.bytes()?;
        self.keys.number(&name, self.limits)
    }

    /// A key of this database.
    pub(super) fn key_of(&mut self, database: u8) -> Result<u32, Failure> {
        let name = self.bytes()?;
        self.keys.number_of(&(database, name), self.limits)
    }

    /// A key, with its name.
    pub(super) fn named_key(&mut self) -> Result<(u32, Bytes), Failure> {
        let name = self.bytes()?;
        Ok((self.keys.number(&name, self.limits)?, name))
    }

    /// All arguments left.
    pub(super) fn all(&mut self) -> Vec<Bytes> {
        std::mem::take(&mut self.rest).to_vec()
    }

    /// All arguments left, as keys.
    pub(super) fn all_keys(&mut self) -> Result<Vec<u32>, Failure> {
        let mut keys = Vec::new();
        while self.left() > 0 {
            keys.push(self.key()?);
        }
        Ok(keys)
    }

    /// So many arguments, as keys.
    pub(super) fn some_keys(&mut self, many: usize) -> Result<Vec<u32>, Failure> {
        (0..many).map(|_| self.key()).collect()
    }

    /// The number of keys that follow: 1 or more.
    pub(super) fn number_of_keys(&mut self) -> Result<usize, Failure> {
        self.positive(Failure::new("ERR numkeys should be greater than 0"))
    }

    /// A number, 1 or more.
    pub(super) fn positive(&mut self, wrong: Failure) -> Result<usize, Failure> {
        let number = number::integer(&self.bytes()?).and_then(|many| usize::try_from(many).ok());
        number.filter(|many| *many > 0).ok_or(wrong)
    }

    /// The error for a number of arguments that the command does not have.
    pub(super) fn arity(&self) -> Failure {
        wrong_arity(self.name)
    }

    /// All arguments left, in pairs.
    pub(super) fn pairs(&mut self) -> Result<Vec<(Bytes, Bytes)>, Failure> {
        if !self.left().is_multiple_of(2) {
            return Err(self.arity());
        }
        let mut pairs = Vec::new();
        while self.left() > 0 {
            pairs.push((self.bytes()?, self.bytes()?));
        }
        Ok(pairs)
    }

    pub(super) fn integer(&mut self) -> Result<i64, Failure> {
        number::integer(&self.bytes()?).ok_or(NOT_INTEGER)
    }

    /// A number of things, 0 or more.
    pub(super) fn count(&mut self) -> Result<u64, Failure> {
        let number = self.integer()?;
        u64::try_from(number)
            .map_err(|_| Failure::new("ERR value is out of range, must be positive"))
    }

    pub(super) fn score(&mut self) -> Result<Score, Failure> {
        Score::parse(&self.bytes()?).ok_or(NOT_FLOAT)
    }

    /// A decimal number, as text.
    pub(super) fn decimal(&mut self) -> Result<Bytes, Failure> {
        let text = self.bytes()?;
        Decimal::parse(&text).map(|_| text).ok_or(NOT_FLOAT)
    }

    /// Reads the next argument if it is this word, in any case.
    pub(super) fn takes(&mut self, word: &str) -> bool {
        match self.rest.split_first() {
            Some((first, rest)) if first.eq_ignore_ascii_case(word.as_bytes()) => {
                self.rest = rest;
                true
            }
            Some(_) | None => false,
        }
    }

    /// An error if arguments are left.
    pub(super) fn end(&self) -> Result<(), Failure> {
        if self.rest.is_empty() { Ok(()) } else { Err(SYNTAX) }
    }
}

/// The error for a wrong number of arguments.
#[must_use]
pub fn wrong_arity(name: &str) -> Failure {
    Failure::of(format!("ERR wrong number of arguments for '{name}' command"))
}

/// Reads a command on data, whose name and arguments these are. None if no such command exists.
///
/// # Errors
/// The arguments are wrong.
pub fn parse(
    words: &[Bytes],
    keys: &mut KeyNames,
    limits: KeyLimits,
) -> Option<Result<Command, Refused>> {
    let (name, rest) = words.split_first()?;
    let spec = COMMANDS.iter().find(|spec| name.eq_ignore_ascii_case(spec.name.as_bytes()))?;
    let count = i64::try_from(words.len()).unwrap_or(i64::MAX);
    let fits = if spec.arity < 0 { count >= -spec.arity } else { count == spec.arity };
    if !fits {
        return Some(Err(Refused { failure: wrong_arity(spec.name), is_early: true }));
    }
    let before = keys.names.len();
    keys.has_refused = false;
    let mut args = Args { name: spec.name, rest, keys, limits };
    let parsed = (spec.parse)(&mut args).and_then(|command| args.end().map(|()| command));
    if parsed.is_err() {
        keys.truncate(before);
    }
    Some(parsed.map_err(|failure| Refused { failure, is_early: keys.has_refused }))
}
