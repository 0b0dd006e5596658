//! Scripts of clients: `EVAL` and its relatives.
//!
//! A script runs as one command of its batch, on the keys that it declares. It carries its whole
//! text, so a replica needs no cache of scripts. Commands that the script gives run on the same
//! slots as the other commands of the batch. The work of a script counts among the work of its
//! transaction: what its commands do, and what Lua does (`orthodrome_lua`).
//!
//! A script whose answer is an error changes nothing. Its changes are undone then: the first change
//! of a key by a script keeps what the key held, which counts as work.

use bytes::Bytes;
use orthodrome_lua::{Args, Heap, Host, Results, Stop, TableId, Value, Vm};
use sha1::{Digest as _, Sha1};

use super::Use;
use super::parse::{self, KeyNames};
use super::reply::{Answer, Failure, Reply};
use super::state::{Context, Slot};
use super::table::COMMANDS;
use super::work::{self, Meter};
use super::{Command, KeyLimits, number};
use crate::txn::AbortReason;
use crate::wire::Wire;

/// A script, with its keys and arguments.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Script {
    /// Its text.
    pub text: Bytes,
    /// Its keys in order: their numbers in the batch, and their names.
    pub keys: Vec<(u32, Bytes)>,
    /// Its other arguments.
    pub arguments: Vec<Bytes>,
    /// True if it may change nothing.
    pub is_read_only: bool,
}

/// The name of scripts in errors.
const CHUNK: &str = "user_script";
/// The version of Redis whose commands are followed.
pub const REDIS_VERSION: &str = "7.0.15";
/// How deeply lists of an answer may nest.
const DEPTH_MAX: u32 = 128;
/// The work for one value of an answer, or one word of a command.
const VALUE_WORK: u64 = 64;
/// The work for one command, besides its words and what it does.
const COMMAND_WORK: u64 = 256;

/// No script with this digest is known.
pub const NO_SCRIPT: Failure = Failure::new("NOSCRIPT No matching script. Please use EVAL.");

/// The SHA-1 of a text, which names it for `EVALSHA`.
#[must_use]
pub fn digest(text: &[u8]) -> String {
    Sha1::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the first line of a script says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flags {
    /// There is none.
    None,
    /// The script may change something.
    Writes,
    /// `no-writes`
    NoWrites,
}

/// Reads the first line of a script.
fn flags(text: &[u8]) -> Result<Flags, Failure> {
    if !text.starts_with(b"#!") {
        return Ok(Flags::None);
    }
    let Some(end) = text.iter().position(|byte| *byte == b'\n') else {
        return Err(Failure::new("ERR Invalid script shebang"));
    };
    let line = String::from_utf8_lossy(text.get(..end.min(1_024)).unwrap_or_default());
    let mut words = line.split_ascii_whitespace();
    let engine = words.next().unwrap_or_default();
    if engine != "#!lua" {
        return Err(Failure::of(format!("ERR Unexpected engine in script shebang: {engine}")));
    }
    let mut found = Flags::Writes;
    for word in words {
        let Some(list) = word.strip_prefix("flags=") else {
            return Err(Failure::of(format!("ERR Unknown lua shebang option: {word}")));
        };
        for flag in list.split(',').filter(|flag| !flag.is_empty()) {
            match flag {
                "no-writes" => found = Flags::NoWrites,
                // Neither memory nor staleness is different for scripts here, and there are no slots.
                "allow-oom" | "allow-stale" | "no-cluster" | "allow-cross-slot-keys" => {}
                other => {
                    let text = format!("ERR Unexpected flag in script shebang: {other}");
                    return Err(Failure::of(text));
                }
            }
        }
    }
    Ok(found)
}

/// Whether a text is a script.
///
/// # Errors
/// Why it is not.
pub fn check(text: &[u8]) -> Result<(), Failure> {
    flags(text)?;
    match orthodrome_lua::check(text, CHUNK, super::WORK_BYTES_MAX as u64) {
        Ok(None) => Ok(()),
        Ok(Some(what)) => Err(does_not_compile(&what)),
        Err(_) => Err(Failure::new("ERR the script is too long")),
    }
}

fn does_not_compile(what: &str) -> Failure {
    Failure::of(format!("ERR Error compiling script (new function): {what}"))
}

/// `EVAL script numkeys [key …] [argument …]`, or `EVAL_RO` if the script may change nothing.
pub(super) fn parse_script(
    args: &mut parse::Args<'_>,
    is_read_only: bool,
) -> Result<Command, Failure> {
    let (text, many) = (args.bytes()?, args.integer()?);
    let Ok(many) = usize::try_from(many) else {
        return Err(Failure::new("ERR Number of keys can't be negative"));
    };
    if many > args.left() {
        return Err(Failure::new("ERR Number of keys can't be greater than number of args"));
    }
    let flags = flags(&text)?;
    if is_read_only && flags == Flags::Writes {
        return Err(Failure::new(
            "ERR Can not execute a script with write flag using *_ro command.",
        ));
    }
    let mut keys = Vec::new();
    for _ in 0..many {
        keys.push(args.named_key()?);
    }
    let is_read_only = is_read_only || flags == Flags::NoWrites;
    Ok(Command::Script(Box::new(Script { text, keys, arguments: args.all(), is_read_only })))
}

/// `EVALSHA digest numkeys …` with a digest that the gateway does not know.
pub(super) fn parse_digest(args: &mut parse::Args<'_>) -> Result<Command, Failure> {
    args.bytes()?;
    args.integer()?;
    args.all();
    Err(NO_SCRIPT)
}

impl Script {
    pub(super) fn uses(&self) -> Vec<(u32, Use)> {
        let what = if self.is_read_only { Use::Read } else { Use::Change };
        self.keys.iter().map(|(key, _)| (*key, what)).collect()
    }

    /// Runs it.
    ///
    /// # Errors
    /// It is more work than is left for the transaction.
    pub(super) fn run(
        &self,
        slots: &mut [Slot],
        cx: Context,
        meter: &mut Meter,
    ) -> Result<Answer, AbortReason> {
        let names = KeyNames::declared(&self.keys);
        let mut world = World { script: self, slots, cx, names, kept: Vec::new() };
        let (answer, left) = match answer(self, &mut world, meter.left()) {
            Ok((answer, left)) => (answer, left),
            Err(_) => return Err(AbortReason::TooLarge),
        };
        if answer.is_err() {
            world.undo();
        }
        meter.set_left(left);
        Ok(answer)
    }
}

/// The answer of a script, and the work that is left.
fn answer(script: &Script, world: &mut World<'_>, work: u64) -> Result<(Answer, u64), Stop> {
    let mut vm = Vm::new(work, world, CHUNK)?;
    prepare(&mut vm, script)?;
    let main = match vm.load(&script.text) {
        Ok(main) => main,
        Err(Stop::Error(what)) => {
            let what = text_of(&vm.heap, what).unwrap_or_default();
            let failure = does_not_compile(&String::from_utf8_lossy(&what));
            return Ok((Err(failure), vm.heap.left()));
        }
        Err(stop @ Stop::Exhausted) => return Err(stop),
    };
    let answer = match vm.call(main, &[]) {
        Ok(values) => reply_of(&mut vm.heap, values.first().copied().unwrap_or_default(), 0)?,
        Err(Stop::Error(error)) => Reply::Error(failure_of(&mut vm, error, &script.text)?),
        Err(stop @ Stop::Exhausted) => return Err(stop),
    };
    let answer = if let Reply::Error(failure) = answer { Err(failure) } else { Ok(answer) };
    Ok((answer, vm.heap.left()))
}

/// The functions of the table `redis`. Their positions are their numbers.
const FUNCTIONS: [&str; 9] = [
    "call",
    "pcall",
    "error_reply",
    "status_reply",
    "sha1hex",
    "log",
    "setresp",
    "set_repl",
    "replicate_commands",
];

const CONSTANTS: [(&str, f64); 10] = [
    ("LOG_DEBUG", 0.0),
    ("LOG_VERBOSE", 1.0),
    ("LOG_NOTICE", 2.0),
    ("LOG_WARNING", 3.0),
    ("REPL_NONE", 0.0),
    ("REPL_AOF", 1.0),
    ("REPL_SLAVE", 2.0),
    ("REPL_REPLICA", 2.0),
    ("REPL_ALL", 3.0),
    // 7.0.15
    ("REDIS_VERSION_NUM", 458_767.0),
];

/// Makes `redis`, `KEYS` and `ARGV`.
fn prepare(vm: &mut Vm<'_>, script: &Script) -> Result<(), Stop> {
    let globals = vm.globals();
    let heap = &mut vm.heap;
    let redis = heap.new_table()?;
    for (number, name) in (0_u16..).zip(FUNCTIONS) {
        heap.set_field(redis, name, Value::Host(number))?;
    }
    for (name, number) in CONSTANTS {
        heap.set_field(redis, name, Value::Number(number))?;
    }
    let version = heap.text(REDIS_VERSION.as_bytes())?;
    heap.set_field(redis, "REDIS_VERSION", version)?;
    heap.protect(redis);
    heap.set_field(globals, "redis", Value::Table(redis))?;
    let keys = list(heap, script.keys.iter().map(|(_, name)| name))?;
    heap.set_field(globals, "KEYS", Value::Table(keys))?;
    let arguments = list(heap, &script.arguments)?;
    heap.set_field(globals, "ARGV", Value::Table(arguments))?;
    heap.protect(globals);
    Ok(())
}

fn list<'a>(heap: &mut Heap, texts: impl IntoIterator<Item = &'a Bytes>) -> Result<TableId, Stop> {
    let table = heap.new_table()?;
    let mut values = Vec::new();
    for text in texts {
        values.push(heap.text(text)?);
    }
    heap.set_list(table, 1, &values)?;
    Ok(table)
}

fn text_of(heap: &Heap, value: Value) -> Option<Vec<u8>> {
    match value {
        Value::String(text) => Some(heap.bytes(text).to_vec()),
        Value::Number(number) => Some(orthodrome_lua::exact(number).into_bytes()),
        Value::Nil
        | Value::Boolean(_)
        | Value::Table(_)
        | Value::Closure(_)
        | Value::Native(_)
        | Value::Host(_)
        | Value::Null => None,
    }
}

/// The error of a script that failed.
fn failure_of(vm: &mut Vm<'_>, error: Value, script: &[u8]) -> Result<Failure, Stop> {
    let (code, text) = match error.as_table() {
        Some(table) => ("", vm.heap.field(table, "err")?),
        None => ("ERR ", error),
    };
    let text = text_of(&vm.heap, text);
    let text = text.map(|text| format!("{code}{}", String::from_utf8_lossy(&text)));
    let text = text.unwrap_or_else(|| "ERR unknown error".to_owned());
    let line = vm.failed_line().unwrap_or(0);
    let digest = digest(script);
    Ok(Failure::of(format!("{text} script: {digest}, on @{CHUNK}:{line}.")))
}

/// The answer that a value is.
fn reply_of(heap: &mut Heap, value: Value, depth: u32) -> Result<Reply, Stop> {
    heap.charge(VALUE_WORK)?;
    if depth > DEPTH_MAX {
        return Ok(Reply::Error(Failure::new("ERR reached lua stack limit")));
    }
    Ok(match value {
        Value::String(text) => Reply::Bulk(Bytes::copy_from_slice(&heap.bytes(text))),
        Value::Number(number) => Reply::Integer(orthodrome_lua::whole(number)),
        Value::Boolean(true) => Reply::Integer(1),
        Value::Table(table) => return table_reply(heap, table, depth),
        Value::Nil
        | Value::Boolean(false)
        | Value::Closure(_)
        | Value::Native(_)
        | Value::Host(_)
        | Value::Null => Reply::Nil,
    })
}

fn table_reply(heap: &mut Heap, table: TableId, depth: u32) -> Result<Reply, Stop> {
    let error = heap.field(table, "err")?;
    if let Value::String(text) = error {
        let text = String::from_utf8_lossy(&heap.bytes(text)).into_owned();
        let text = text.strip_prefix('-').unwrap_or(&text);
        return Ok(Reply::Error(Failure::of(text.to_owned())));
    }
    let status = heap.field(table, "ok")?;
    if let Value::String(text) = status {
        return Ok(Reply::Line(String::from_utf8_lossy(&heap.bytes(text)).into_owned()));
    }
    let double = heap.field(table, "double")?;
    if let Value::Number(number) = double
        && let Some(score) = number::Score::new(number)
    {
        return Ok(Reply::Double(score));
    }
    let map = heap.field(table, "map")?;
    if let Value::Table(map) = map {
        let mut pairs = Vec::new();
        for (key, value) in heap.pairs(map)? {
            let key = reply_of(heap, key, depth + 1)?;
            pairs.push((key, reply_of(heap, value, depth + 1)?));
        }
        return Ok(Reply::Map(pairs));
    }
    let set = heap.field(table, "set")?;
    if let Value::Table(set) = set {
        let mut members = Vec::new();
        for (key, _) in heap.pairs(set)? {
            members.push(reply_of(heap, key, depth + 1)?);
        }
        return Ok(Reply::Set(members));
    }
    let mut items = Vec::new();
    for position in 1.. {
        let item = heap.element(table, position);
        if item.is_nil() {
            break;
        }
        items.push(reply_of(heap, item, depth + 1)?);
    }
    Ok(Reply::Array(items))
}

/// The value that an answer is, as with RESP2.
fn value_of(heap: &mut Heap, reply: &Reply) -> Result<Value, Stop> {
    let mut items = Vec::new();
    match reply {
        Reply::Integer(number) => {
            #[expect(clippy::cast_precision_loss, reason = "Lua has no other numbers")]
            let number = *number as f64;
            return Ok(Value::Number(number));
        }
        Reply::Bulk(text) => return heap.text(text),
        Reply::Nil | Reply::NilArray => return Ok(Value::Boolean(false)),
        Reply::Double(score) => return heap.text(score.to_string().as_bytes()),
        Reply::Status(text) => return field(heap, "ok", text),
        Reply::Line(text) => return field(heap, "ok", text),
        Reply::Error(failure) => return field(heap, "err", &failure.0),
        Reply::Array(own) | Reply::Set(own) => {
            for item in own {
                items.push(value_of(heap, item)?);
            }
        }
        Reply::Map(pairs) => {
            for (name, value) in pairs {
                items.push(value_of(heap, name)?);
                items.push(value_of(heap, value)?);
            }
        }
        Reply::Couples(pairs) => {
            for (name, value) in pairs {
                items.push(heap.text(name)?);
                items.push(heap.text(value)?);
            }
        }
        Reply::Pairs(pairs) => {
            for (name, score) in pairs {
                items.push(heap.text(name)?);
                items.push(heap.text(score.to_string().as_bytes())?);
            }
        }
    }
    let table = heap.new_table()?;
    heap.set_list(table, 1, &items)?;
    Ok(Value::Table(table))
}

/// A table with one field.
fn field(heap: &mut Heap, name: &str, text: &str) -> Result<Value, Stop> {
    let table = heap.new_table()?;
    let text = heap.text(text.as_bytes())?;
    heap.set_field(table, name, text)?;
    Ok(Value::Table(table))
}

/// What a script reaches: the keys of its batch that it declared.
struct World<'a> {
    script: &'a Script,
    slots: &'a mut [Slot],
    cx: Context,
    /// The keys, by their names.
    names: KeyNames,
    /// What keys held that the script changed, if they had been changed before it.
    kept: Vec<(u32, Option<Box<Slot>>)>,
}

/// Why a command of a script had no effect.
enum Trouble {
    Failure(Failure),
    Stop(Stop),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

const NO_COMMAND: Failure =
    Failure::new("ERR Please specify at least one argument for this redis lib call");
const NO_WORD: Failure =
    Failure::new("ERR Lua redis lib command arguments must be strings or integers");
const UNKNOWN: Failure = Failure::new("ERR Unknown Redis command called from script");
const WRONG_NUMBER: Failure =
    Failure::new("ERR Wrong number of args calling Redis command from script");
const NOT_ALLOWED: Failure = Failure::new("ERR This Redis command is not allowed from script");
const NO_MESSAGES: Failure = Failure::new(
    "ERR PUBLISH and SPUBLISH are not available in scripts, because a script changes only the keys \
     that it declares; return the message, or publish beside the script between MULTI and EXEC",
);
const NO_WRITES: Failure =
    Failure::new("ERR Write commands are not allowed from read-only scripts.");

/// Commands that clients may give and scripts may not.
const REFUSED: [&str; 30] = [
    "auth",
    "client",
    "command",
    "config",
    "discard",
    "eval",
    "eval_ro",
    "evalsha",
    "evalsha_ro",
    "exec",
    "fcall",
    "fcall_ro",
    "function",
    "hello",
    "info",
    "multi",
    "psubscribe",
    "punsubscribe",
    "quit",
    "reset",
    "script",
    "select",
    "ssubscribe",
    "subscribe",
    "sunsubscribe",
    "monitor",
    "pubsub",
    "unsubscribe",
    "unwatch",
    "watch",
];

impl World<'_> {
    /// Runs a command that the script gives.
    fn command(&mut self, heap: &mut Heap, values: &[Value]) -> Result<Reply, Trouble> {
        if values.is_empty() {
            return Err(NO_COMMAND.into());
        }
        heap.charge(COMMAND_WORK)?;
        let mut words = Vec::new();
        for value in values {
            let text = text_of(heap, *value).ok_or(NO_WORD)?;
            heap.charge(VALUE_WORK + text.len() as u64)?;
            words.push(Bytes::from(text));
        }
        let name = words.first().cloned().unwrap_or_default();
        let is = |own: &str| name.eq_ignore_ascii_case(own.as_bytes());
        match (words.as_slice(), self.cx.now_ms) {
            ([_], now_ms) if is("time") => {
                let text = |number: u64| Reply::Bulk(number.to_string().into());
                return Ok(Reply::Array(vec![text(now_ms / 1_000), text(now_ms % 1_000 * 1_000)]));
            }
            ([_], _) if is("ping") => return Ok(Reply::Status("PONG")),
            ([_, text], _) if is("ping") || is("echo") => return Ok(Reply::Bulk(text.clone())),
            _ => {}
        }
        if REFUSED.iter().any(|own| is(own)) {
            return Err(NOT_ALLOWED.into());
        }
        if is("publish") || is("spublish") {
            return Err(NO_MESSAGES.into());
        }
        let spec = COMMANDS.iter().find(|spec| is(spec.name)).ok_or(UNKNOWN)?;
        let many = i64::try_from(words.len()).unwrap_or(i64::MAX);
        if many < spec.arity.abs() || (spec.arity > 0 && many != spec.arity) {
            return Err(WRONG_NUMBER.into());
        }
        let limits = KeyLimits { keys_max: usize::MAX, key_bytes_max: usize::MAX };
        let parsed = parse::parse(&words, &mut self.names, limits).ok_or(UNKNOWN)?;
        let command = parsed.map_err(|refused| refused.failure)?;
        if self.script.is_read_only && !spec.is_read_only {
            return Err(NO_WRITES.into());
        }
        for (key, what) in command.uses() {
            if what != Use::Read {
                self.keep(heap, key)?;
            }
        }
        heap.charge(work::work(&command, self.slots) as u64)?;
        Ok(super::execute(&command, self.slots, self.cx)?)
    }

    /// Keeps what a key holds before the script changes it.
    fn keep(&mut self, heap: &mut Heap, key: u32) -> Result<(), Stop> {
        if self.kept.iter().any(|(own, _)| *own == key) {
            return Ok(());
        }
        let Some(slot) = self.slots.get(key as usize) else { return Ok(()) };
        // The same whether it is copied now, or read again if the script fails.
        heap.charge(slot.cost() as u64)?;
        self.kept.push((key, slot.keep().map(Box::new)));
        Ok(())
    }

    /// Undoes what the script changed.
    fn undo(&mut self) {
        for (key, before) in std::mem::take(&mut self.kept) {
            if let Some(slot) = self.slots.get_mut(key as usize) {
                slot.restore(before.map(|before| *before), self.cx);
            }
        }
    }
}

impl Host for World<'_> {
    fn invoke(&mut self, function: u16, vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
        let name = FUNCTIONS.get(usize::from(function)).copied().unwrap_or_default();
        let values = vm.args(args, 0);
        match name {
            "call" | "pcall" => {
                let failure = match self.command(&mut vm.heap, &values) {
                    Ok(reply) => return value_of(&mut vm.heap, &reply).map(Results::One),
                    Err(Trouble::Stop(stop)) => return Err(stop),
                    Err(Trouble::Failure(failure)) => failure,
                };
                let error = field(&mut vm.heap, "err", &failure.0)?;
                if name == "pcall" { Ok(Results::One(error)) } else { Err(Stop::Error(error)) }
            }
            "error_reply" | "status_reply" => {
                let text = match values.as_slice() {
                    [one @ Value::String(_)] => text_of(&vm.heap, *one),
                    _ => None,
                };
                let Some(text) = text else {
                    let error = field(&mut vm.heap, "err", "ERR wrong number or type of arguments");
                    return error.map(Results::One);
                };
                let text = String::from_utf8_lossy(&text).into_owned();
                if name == "status_reply" {
                    return field(&mut vm.heap, "ok", &text).map(Results::One);
                }
                // An error begins with a code.
                let text = text.strip_prefix('-').unwrap_or(&text);
                let text = if text.contains(' ') { text.to_owned() } else { format!("ERR {text}") };
                field(&mut vm.heap, "err", &text).map(Results::One)
            }
            "sha1hex" => {
                let [one] = values.as_slice() else {
                    return Err(vm.error("wrong number of arguments"));
                };
                let text = text_of(&vm.heap, *one).unwrap_or_default();
                // The digest of nothing takes as long as that of a block.
                vm.heap.charge(512 + 4 * text.len() as u64)?;
                let digest = digest(&text);
                vm.heap.text(digest.as_bytes()).map(Results::One)
            }
            "setresp" => match values.as_slice() {
                [Value::Number(2.0)] => Ok(Results::None),
                _ => Err(vm.error("RESP version must be 2: answers of RESP3 are not available")),
            },
            "replicate_commands" => Ok(Results::One(Value::Boolean(true))),
            // Nodes do not log what scripts say, and what is replicated is the transaction.
            _ => Ok(Results::None),
        }
    }
}
