//! Runs the code of a script.
//!
//! Calls of functions of the script take no room on the stack of the program: their frames are in a
//! list. Only what goes through the library nests there: `pcall`, `sort` with a function, functions
//! of metatables. Both are bounded.

use std::rc::Rc;

use crate::code::{Capture, Code, OPEN, Op, Proto};
use crate::compiler;
use crate::heap::{Cell, Closure, Heap, Stop};
use crate::library;
use crate::number;
use crate::value::{StringId, TableId, Value};

/// How many functions of a script may be active.
const FRAMES_MAX: usize = 20_000;
/// How many values functions that are active may have.
const STACK_MAX: usize = 200_000;
/// How deeply calls may nest that go through the library.
const NESTED_MAX: u32 = 100;
/// How many tables `__index` may lead through.
const META_CHAIN_MAX: u32 = 100;
/// The work of one instruction.
const OP_WORK: u64 = 4;
/// The work of writing a number as text.
pub(crate) const NUMBER_WORK: u64 = 64;
/// The work of one call of a function of the library, besides what it does.
const CALL_WORK: u64 = 16;

/// What a script runs in.
pub trait Host {
    /// Runs function number `function` of the host.
    ///
    /// # Errors
    /// Whatever stops the script, or an error that it can catch.
    fn invoke(&mut self, function: u16, vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop>;
}

/// The arguments of a call of a library's function: where they are on the stack.
#[derive(Clone, Copy, Debug)]
pub struct Args {
    base: usize,
    /// How many there are.
    pub count: usize,
    /// The function that was called.
    pub(crate) callee: Value,
}

/// The results of a call.
#[derive(Debug)]
pub enum Results {
    /// None.
    None,
    /// One.
    One(Value),
    /// Several.
    Many(Vec<Value>),
}

impl Results {
    fn as_slice(&self) -> &[Value] {
        match self {
            Self::None => &[],
            Self::One(value) => std::slice::from_ref(value),
            Self::Many(values) => values,
        }
    }
}

/// A function of the library.
pub(crate) type Native = fn(&mut Vm<'_>, Args) -> Result<Results, Stop>;

/// A function of a script that is active.
#[derive(Debug)]
struct Frame {
    proto: Rc<Proto>,
    cells: Rc<[u32]>,
    /// Where the function is on the stack; its results go there.
    function: usize,
    /// Its first register.
    base: usize,
    /// The arguments beyond the parameters: where they are, and how many.
    rest: (usize, usize),
    /// The next instruction.
    at: usize,
    /// How many results the caller wants.
    wanted: u8,
    /// Whether whoever runs the code returns with it.
    is_first: bool,
}

impl Frame {
    /// The line of the instruction that runs.
    fn line(&self) -> Option<u32> {
        self.proto.lines.get(self.at.saturating_sub(1)).copied()
    }
}

/// A script with everything that it has made.
pub struct Vm<'h> {
    /// What it has made.
    pub heap: Heap,
    host: Option<&'h mut dyn Host>,
    stack: Vec<Value>,
    /// The end of the values of the last call that left all that it had.
    top: usize,
    frames: Vec<Frame>,
    /// Captured variables of functions that are active: position on the stack, and cell; in order.
    open: Vec<(usize, u32)>,
    nested: u32,
    /// The number of frames when a function of the library called another one.
    bare: Option<usize>,
    /// The line of the error that no function has caught.
    failed_line: Option<u32>,
    globals: TableId,
    /// The table of functions of strings, and the metatable that leads there.
    strings: TableId,
    string_meta: TableId,
    chunk: &'static str,
    /// The state of `math.random`.
    pub(crate) random: u64,
    names: Metas,
}

/// The names of functions in metatables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metas {
    index: Value,
    new_index: Value,
    call: Value,
    equal: Value,
    less: Value,
    less_equal: Value,
    concat: Value,
    negate: Value,
    arithmetic: [Value; 6],
    pub(crate) shown: Value,
    pub(crate) meta: Value,
}

impl Metas {
    fn new(heap: &mut Heap) -> Result<Self, Stop> {
        Ok(Self {
            index: heap.text(b"__index")?,
            new_index: heap.text(b"__newindex")?,
            call: heap.text(b"__call")?,
            equal: heap.text(b"__eq")?,
            less: heap.text(b"__lt")?,
            less_equal: heap.text(b"__le")?,
            concat: heap.text(b"__concat")?,
            negate: heap.text(b"__unm")?,
            arithmetic: [
                heap.text(b"__add")?,
                heap.text(b"__sub")?,
                heap.text(b"__mul")?,
                heap.text(b"__div")?,
                heap.text(b"__mod")?,
                heap.text(b"__pow")?,
            ],
            shown: heap.text(b"__tostring")?,
            meta: heap.text(b"__metatable")?,
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
    Mod,
    Pow,
}

impl Arithmetic {
    fn of(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            Self::Mod => number::modulo(a, b),
            Self::Pow => libm::pow(a, b),
        }
    }
}

impl<'h> Vm<'h> {
    /// A script that may do `work`, with the library and this host. Errors name the text `chunk`.
    ///
    /// # Errors
    /// The work is not enough for the library.
    pub fn new(work: u64, host: &'h mut dyn Host, chunk: &'static str) -> Result<Self, Stop> {
        let mut heap = Heap::new(work);
        let globals = heap.new_table()?;
        let names = Metas::new(&mut heap)?;
        let mut vm = Self {
            heap,
            host: Some(host),
            stack: Vec::new(),
            top: 0,
            frames: Vec::new(),
            open: Vec::new(),
            nested: 0,
            bare: None,
            failed_line: None,
            globals,
            strings: globals,
            string_meta: globals,
            chunk,
            random: library::RANDOM_SEED,
            names,
        };
        vm.strings = library::install(&mut vm.heap, globals)?;
        vm.string_meta = vm.heap.new_table()?;
        vm.heap.set(vm.string_meta, vm.names.index, Value::Table(vm.strings))?;
        vm.heap.protect(vm.string_meta);
        Ok(vm)
    }

    /// The table of global variables.
    #[must_use]
    pub fn globals(&self) -> TableId {
        self.globals
    }

    pub(crate) fn metas(&self) -> Metas {
        self.names
    }

    /// The function that a text is.
    ///
    /// # Errors
    /// The text is no script.
    pub fn load(&mut self, text: &[u8]) -> Result<Value, Stop> {
        self.load_as(text, self.chunk)
    }

    pub(crate) fn load_as(&mut self, text: &[u8], chunk: &str) -> Result<Value, Stop> {
        let compiled = compiler::compile(&mut self.heap, text, chunk);
        match compiled {
            Ok(proto) => self.heap.new_closure(Closure::Script { proto, cells: Rc::from([]) }),
            Err(refusal) => Err(compiler::refusal(&mut self.heap, refusal)),
        }
    }

    // Errors.

    /// The line of the function of the script that runs at this level; 1 is the innermost.
    pub(crate) fn position(&self, level: usize) -> Option<u32> {
        if self.bare == Some(self.frames.len()) {
            return None;
        }
        self.frames.get(self.frames.len().checked_sub(level)?)?.line()
    }

    /// The line that runs; none if nothing does.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        self.position(1)
    }

    /// The line of the error that ended the script; of the last call before it, if it was raised by
    /// the library.
    #[must_use]
    pub fn failed_line(&self) -> Option<u32> {
        self.failed_line
    }

    /// Forgets an error that was caught.
    pub(crate) fn forget_error(&mut self) {
        self.failed_line = None;
    }

    /// An error with this text, after the name of the script and the line.
    pub fn error(&mut self, text: &str) -> Stop {
        self.error_at(1, text.as_bytes())
    }

    pub(crate) fn error_at(&mut self, level: usize, text: &[u8]) -> Stop {
        let mut whole = match self.position(level) {
            Some(line) if level > 0 => format!("{}:{line}: ", self.chunk).into_bytes(),
            _ => Vec::new(),
        };
        whole.extend_from_slice(text);
        match self.heap.text(&whole) {
            Ok(text) => Stop::Error(text),
            Err(stop) => stop,
        }
    }

    /// What the source calls the value in a register of the function that runs.
    fn called(&self, register: usize) -> String {
        let named = self.frames.last().and_then(|frame| {
            let at = u32::try_from(frame.at.checked_sub(1)?).ok()?;
            let register = u8::try_from(register.checked_sub(frame.base)?).ok()?;
            frame.proto.names.get(&(at, register))
        });
        named
            .map_or_else(String::new, |(kind, name)| format!("{kind} '{}'", self.heap.shown(*name)))
    }

    fn type_error(&mut self, what: &str, value: Value, register: Option<usize>) -> Stop {
        let kind = value.type_name();
        let called = register.map_or_else(String::new, |register| self.called(register));
        let text = if called.is_empty() {
            format!("attempt to {what} a {kind} value")
        } else {
            format!("attempt to {what} {called} (a {kind} value)")
        };
        self.error(&text)
    }

    // Arguments.

    /// An argument, from 0; nil if it is missing.
    #[must_use]
    pub fn arg(&self, args: Args, number: usize) -> Value {
        if number >= args.count {
            return Value::Nil;
        }
        self.register(args.base + number)
    }

    /// All arguments from `first`.
    #[must_use]
    pub fn args(&self, args: Args, first: usize) -> Vec<Value> {
        let all = self.stack.get(args.base..args.base + args.count).unwrap_or_default();
        all.get(first..).unwrap_or_default().to_vec()
    }

    /// An error about an argument, from 0.
    pub(crate) fn bad_arg(&mut self, args: Args, number: usize, what: &str) -> Stop {
        let name = library::name(args.callee);
        // The object of a method does not count.
        let is_method = self.called(args.base.saturating_sub(1)).starts_with("method");
        let number = if is_method { number } else { number + 1 };
        let text = format!("bad argument #{number} to '{name}' ({what})");
        self.error(&text)
    }

    pub(crate) fn wrong_type(&mut self, args: Args, number: usize, wanted: &str) -> Stop {
        let found = match self.arg(args, number) {
            Value::Nil if number >= args.count => "no value",
            value => value.type_name(),
        };
        self.bad_arg(args, number, &format!("{wanted} expected, got {found}"))
    }

    pub(crate) fn table_arg(&mut self, args: Args, number: usize) -> Result<TableId, Stop> {
        let table = self.arg(args, number).as_table();
        table.ok_or_else(|| self.wrong_type(args, number, "table"))
    }

    pub(crate) fn number_arg(&mut self, args: Args, number: usize) -> Result<f64, Stop> {
        let value = self.arg(args, number);
        let found = self.number_of(value);
        found.ok_or_else(|| self.wrong_type(args, number, "number"))
    }

    pub(crate) fn integer_arg(&mut self, args: Args, number: usize) -> Result<i64, Stop> {
        self.number_arg(args, number).map(number::whole)
    }

    pub(crate) fn integer_or(
        &mut self,
        args: Args,
        number: usize,
        otherwise: i64,
    ) -> Result<i64, Stop> {
        if self.arg(args, number).is_nil() {
            return Ok(otherwise);
        }
        self.integer_arg(args, number)
    }

    pub(crate) fn string_arg(&mut self, args: Args, number: usize) -> Result<Rc<[u8]>, Stop> {
        match self.text_of(self.arg(args, number))? {
            Some(text) => Ok(self.heap.bytes(text)),
            None => Err(self.wrong_type(args, number, "string")),
        }
    }

    pub(crate) fn any_arg(&mut self, args: Args, number: usize) -> Result<Value, Stop> {
        if number >= args.count {
            return Err(self.bad_arg(args, number, "value expected"));
        }
        Ok(self.arg(args, number))
    }

    /// The number that a value is, or that a string shows.
    pub(crate) fn number_of(&self, value: Value) -> Option<f64> {
        match value {
            Value::Number(number) => Some(number),
            Value::String(string) => number::parse(&self.heap.bytes(string)),
            Value::Nil
            | Value::Boolean(_)
            | Value::Table(_)
            | Value::Closure(_)
            | Value::Native(_)
            | Value::Host(_)
            | Value::Null => None,
        }
    }

    /// The string that a value is, or that shows a number.
    pub(crate) fn text_of(&mut self, value: Value) -> Result<Option<StringId>, Stop> {
        match value {
            Value::String(string) => Ok(Some(string)),
            Value::Number(number) => {
                self.heap.charge(NUMBER_WORK)?;
                self.heap.string(number::shown(number).as_bytes()).map(Some)
            }
            Value::Nil
            | Value::Boolean(_)
            | Value::Table(_)
            | Value::Closure(_)
            | Value::Native(_)
            | Value::Host(_)
            | Value::Null => Ok(None),
        }
    }

    // The stack.

    #[inline]
    fn register(&self, at: usize) -> Value {
        self.stack.get(at).copied().unwrap_or_default()
    }

    #[inline]
    fn set_register(&mut self, at: usize, value: Value) {
        if let Some(register) = self.stack.get_mut(at) {
            *register = value;
        }
    }

    /// Makes the stack end here. What is new is nil.
    fn resize(&mut self, length: usize) -> Result<(), Stop> {
        if length > STACK_MAX {
            return Err(self.error("stack overflow"));
        }
        self.stack.resize(length, Value::Nil);
        Ok(())
    }

    fn extend(&mut self, length: usize) -> Result<(), Stop> {
        if length > self.stack.len() { self.resize(length) } else { Ok(()) }
    }

    /// Ends the variables from this position on; functions keep their values.
    fn close(&mut self, from: usize) {
        while let Some((position, cell)) = self.open.last().copied()
            && position >= from
        {
            let value = self.register(position);
            self.heap.set_cell(cell, Cell::Closed(value));
            self.open.pop();
        }
    }

    /// The cell of a variable.
    fn capture(&mut self, position: usize) -> Result<u32, Stop> {
        let at = match self.open.binary_search_by_key(&position, |(own, _)| *own) {
            Ok(at) => return Ok(self.open.get(at).map_or(0, |(_, cell)| *cell)),
            Err(at) => at,
        };
        let cell = self.heap.new_cell(position)?;
        self.open.insert(at, (position, cell));
        Ok(cell)
    }

    // Calls.

    /// Calls a function.
    ///
    /// # Errors
    /// The error of the function, or the end of the script.
    pub fn call(&mut self, function: Value, args: &[Value]) -> Result<Vec<Value>, Stop> {
        if self.nested >= NESTED_MAX {
            return Err(self.error("stack overflow"));
        }
        let (start, top) = (self.stack.len(), self.top);
        let frames = self.frames.len();
        self.extend(start + 1 + args.len())?;
        self.set_register(start, function);
        for (at, value) in args.iter().enumerate() {
            self.set_register(start + 1 + at, *value);
        }
        let is_native = !matches!(function, Value::Closure(_));
        let before = std::mem::replace(&mut self.bare, is_native.then_some(frames));
        self.nested += 1;
        let called = self.call_on_stack(start, args.len());
        self.nested -= 1;
        self.bare = before;
        let called = called
            .map(|()| self.stack.get(start..self.top).map_or_else(Vec::new, <[Value]>::to_vec));
        if called.is_err() {
            let line = self.frames.last().and_then(|frame| frame.line());
            self.failed_line = self.failed_line.or(line);
            self.close(start);
            self.frames.truncate(frames);
        }
        self.stack.truncate(start);
        self.top = top;
        called
    }

    fn call_on_stack(&mut self, function: usize, count: usize) -> Result<(), Stop> {
        if self.enter(function, count, OPEN)? {
            if let Some(frame) = self.frames.last_mut() {
                frame.is_first = true;
            }
            self.run()?;
        }
        Ok(())
    }

    fn call_one(&mut self, function: Value, args: &[Value]) -> Result<Value, Stop> {
        self.call(function, args).map(|results| results.first().copied().unwrap_or_default())
    }

    /// Begins a call of what is on the stack at `function`, with `count` values after it. True if a
    /// function of the script is to run; otherwise its results are there.
    fn enter(&mut self, function: usize, count: usize, wanted: u8) -> Result<bool, Stop> {
        let callee = self.register(function);
        let native = match callee {
            Value::Closure(closure) => match self.heap.closure(closure) {
                Some(Closure::Script { proto, cells }) => {
                    let (proto, cells) = (Rc::clone(proto), Rc::clone(cells));
                    return self.push_frame(proto, cells, (function, count), wanted).map(|()| true);
                }
                Some(Closure::Native { function, .. }) => Some(*function),
                None => None,
            },
            Value::Native(native) => Some(native),
            Value::Host(_) => None,
            Value::Nil
            | Value::Boolean(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Table(_)
            | Value::Null => {
                return self.enter_meta(function, count, wanted);
            }
        };
        self.heap.charge(CALL_WORK)?;
        let args = Args { base: function + 1, count, callee };
        // Whatever the function puts on the stack comes after its arguments.
        self.extend(function + 1 + count)?;
        let results = match (native.and_then(library::function), callee) {
            (Some(native), _) => native(self, args)?,
            (None, Value::Host(number)) => {
                let Some(host) = self.host.take() else {
                    return Err(self.error("a function of the host calls itself"));
                };
                let results = host.invoke(number, self, args);
                self.host = Some(host);
                results?
            }
            (None, _) => Results::None,
        };
        self.leave(function, results.as_slice(), wanted)?;
        Ok(false)
    }

    /// Calls a value that is no function, by its metatable.
    fn enter_meta(&mut self, function: usize, count: usize, wanted: u8) -> Result<bool, Stop> {
        let callee = self.register(function);
        let handler = self.meta_of(callee, self.names.call)?;
        if !handler.is_function() {
            return Err(self.type_error("call", callee, Some(function)));
        }
        self.extend(function + 2 + count)?;
        if let Some(moved) = self.stack.get_mut(function..function + 2 + count) {
            moved.rotate_right(1);
        }
        self.set_register(function, handler);
        self.enter(function, count + 1, wanted)
    }

    fn push_frame(
        &mut self,
        proto: Rc<Proto>,
        cells: Rc<[u32]>,
        (function, count): (usize, usize),
        wanted: u8,
    ) -> Result<(), Stop> {
        if self.frames.len() >= FRAMES_MAX {
            return Err(self.error("stack overflow"));
        }
        let params = usize::from(proto.params);
        let first = function + 1;
        let mut base = first;
        let mut rest = (0, 0);
        if proto.has_rest {
            // The parameters are copied after all arguments.
            base = first + count;
            rest = (first + params, count.saturating_sub(params));
        }
        let end = base + proto.registers;
        self.heap.charge(proto.registers as u64 / 4)?;
        if end > STACK_MAX {
            return Err(self.error("stack overflow"));
        }
        self.stack.truncate(first + count);
        self.resize(end)?;
        if proto.has_rest {
            for at in 0..params.min(count) {
                let value = self.register(first + at);
                self.set_register(base + at, value);
            }
        } else if count > params
            && let Some(extra) = self.stack.get_mut(first + params..end.min(first + count))
        {
            extra.fill(Value::Nil);
        }
        let frame = Frame { proto, cells, function, base, rest, at: 0, wanted, is_first: false };
        self.frames.push(frame);
        Ok(())
    }

    /// Puts results where the caller expects them.
    fn leave(&mut self, to: usize, results: &[Value], wanted: u8) -> Result<(), Stop> {
        if wanted != OPEN {
            for at in 0..usize::from(wanted) {
                let value = results.get(at).copied().unwrap_or_default();
                self.set_register(to + at, value);
            }
            return self.restore(0);
        }
        self.top = to + results.len();
        self.extend(self.top)?;
        for (at, value) in results.iter().enumerate() {
            self.set_register(to + at, *value);
        }
        self.restore(self.top)
    }

    /// Makes the stack as long as the function that runs needs it, and at least `least`.
    fn restore(&mut self, least: usize) -> Result<(), Stop> {
        let end = self.frames.last().map_or(0, |frame| frame.base + frame.proto.registers);
        self.extend(end.max(least))
    }

    /// Returns values from the function that runs. True if whoever runs the code returns, too.
    fn return_from(&mut self, from: usize, count: usize) -> Result<bool, Stop> {
        let Some(frame) = self.frames.pop() else { return Ok(true) };
        self.close(frame.base);
        let to = frame.function;
        let wanted = if frame.wanted == OPEN { count } else { usize::from(frame.wanted) };
        self.extend(to + wanted)?;
        for at in 0..wanted {
            let value = if at < count { self.register(from + at) } else { Value::Nil };
            self.set_register(to + at, value);
        }
        if frame.wanted == OPEN {
            self.top = to + wanted;
        }
        if !frame.is_first {
            let end = self.frames.last().map_or(0, |own| own.base + own.proto.registers);
            self.stack.truncate(end.max(to + wanted));
            self.extend(end)?;
        }
        Ok(frame.is_first)
    }

    // Metatables.

    pub(crate) fn metatable(&self, value: Value) -> Option<TableId> {
        match value {
            Value::Table(table) => self.heap.meta(table),
            Value::String(_) => Some(self.string_meta),
            Value::Nil
            | Value::Boolean(_)
            | Value::Number(_)
            | Value::Closure(_)
            | Value::Native(_)
            | Value::Host(_)
            | Value::Null => None,
        }
    }

    pub(crate) fn meta_of(&mut self, value: Value, name: Value) -> Result<Value, Stop> {
        match self.metatable(value) {
            Some(meta) => self.heap.get(meta, name),
            None => Ok(Value::Nil),
        }
    }

    /// `value[key]`; `register` is where the value is, for errors.
    pub(crate) fn index(
        &mut self,
        value: Value,
        key: Value,
        register: Option<usize>,
    ) -> Result<Value, Stop> {
        let mut value = value;
        for link in 0..META_CHAIN_MAX {
            let handler = match value {
                Value::Table(table) => {
                    if table == self.globals && key.as_string().is_some() {
                        return self.global(key);
                    }
                    let found = self.heap.get(table, key)?;
                    if !found.is_nil() {
                        return Ok(found);
                    }
                    let Some(meta) = self.heap.meta(table) else { return Ok(Value::Nil) };
                    let handler = self.heap.get(meta, self.names.index)?;
                    if handler.is_nil() {
                        return Ok(Value::Nil);
                    }
                    handler
                }
                Value::String(_) => Value::Table(self.strings),
                Value::Nil
                | Value::Boolean(_)
                | Value::Number(_)
                | Value::Closure(_)
                | Value::Native(_)
                | Value::Host(_)
                | Value::Null => {
                    let register = register.filter(|_| link == 0);
                    return Err(self.type_error("index", value, register));
                }
            };
            if handler.is_function() {
                return self.call_one(handler, &[value, key]);
            }
            value = handler;
        }
        Err(self.error("loop in gettable"))
    }

    /// `target[key] = value`
    fn set_index(
        &mut self,
        target: Value,
        key: Value,
        value: Value,
        register: Option<usize>,
    ) -> Result<(), Stop> {
        let mut target = target;
        for link in 0..META_CHAIN_MAX {
            let handler = match target {
                Value::Table(table) => {
                    let handler = match self.heap.meta(table) {
                        Some(meta) if self.heap.get(table, key)?.is_nil() => {
                            self.heap.get(meta, self.names.new_index)?
                        }
                        Some(_) | None => Value::Nil,
                    };
                    if handler.is_nil() {
                        return self.raw_set(table, key, value);
                    }
                    handler
                }
                Value::Nil
                | Value::Boolean(_)
                | Value::Number(_)
                | Value::String(_)
                | Value::Closure(_)
                | Value::Native(_)
                | Value::Host(_)
                | Value::Null => {
                    let register = register.filter(|_| link == 0);
                    return Err(self.type_error("index", target, register));
                }
            };
            if handler.is_function() {
                return self.call(handler, &[target, key, value]).map(drop);
            }
            target = handler;
        }
        Err(self.error("loop in settable"))
    }

    /// Sets an element without metatables.
    pub(crate) fn raw_set(&mut self, table: TableId, key: Value, value: Value) -> Result<(), Stop> {
        if self.heap.is_read_only(table) {
            return Err(self.error("Attempt to modify a readonly table"));
        }
        if key.is_nil() {
            return Err(self.error("table index is nil"));
        }
        if let Value::Number(number) = key
            && number.is_nan()
        {
            return Err(self.error("table index is NaN"));
        }
        self.heap.set(table, key, value)
    }

    // Operators.

    fn arithmetic(
        &mut self,
        how: Arithmetic,
        (left, left_register): (Value, Option<usize>),
        (right, right_register): (Value, Option<usize>),
    ) -> Result<Value, Stop> {
        if let (Some(a), Some(b)) = (self.number_of(left), self.number_of(right)) {
            return Ok(Value::Number(how.of(a, b)));
        }
        let name = self.names.arithmetic.get(how as usize).copied().unwrap_or_default();
        let mut handler = self.meta_of(left, name)?;
        if handler.is_nil() {
            handler = self.meta_of(right, name)?;
        }
        if handler.is_nil() {
            let (value, register) = match self.number_of(left) {
                None => (left, left_register),
                Some(_) => (right, right_register),
            };
            return Err(self.type_error("perform arithmetic on", value, register));
        }
        self.call_one(handler, &[left, right])
    }

    pub(crate) fn equals(&mut self, left: Value, right: Value) -> Result<bool, Stop> {
        if left == right {
            return Ok(true);
        }
        let (Value::Table(_), Value::Table(_)) = (left, right) else { return Ok(false) };
        let handler = self.meta_of(left, self.names.equal)?;
        if handler.is_nil() || handler != self.meta_of(right, self.names.equal)? {
            return Ok(false);
        }
        Ok(self.call_one(handler, &[left, right])?.is_true())
    }

    pub(crate) fn less(&mut self, left: Value, right: Value) -> Result<bool, Stop> {
        match (left, right) {
            (Value::Number(a), Value::Number(b)) => Ok(a < b),
            (Value::String(a), Value::String(b)) => self.order(a, b).map(std::cmp::Ordering::is_lt),
            _ => match self.ordered_by_meta(left, right, self.names.less)? {
                Some(is_less) => Ok(is_less),
                None => Err(self.order_error(left, right)),
            },
        }
    }

    fn less_equal(&mut self, left: Value, right: Value) -> Result<bool, Stop> {
        match (left, right) {
            (Value::Number(a), Value::Number(b)) => Ok(a <= b),
            (Value::String(a), Value::String(b)) => self.order(a, b).map(std::cmp::Ordering::is_le),
            _ => {
                if let Some(is) = self.ordered_by_meta(left, right, self.names.less_equal)? {
                    return Ok(is);
                }
                match self.ordered_by_meta(right, left, self.names.less)? {
                    Some(is_greater) => Ok(!is_greater),
                    None => Err(self.order_error(left, right)),
                }
            }
        }
    }

    fn order(&mut self, a: StringId, b: StringId) -> Result<std::cmp::Ordering, Stop> {
        let (a, b) = (self.heap.bytes(a), self.heap.bytes(b));
        self.heap.charge_length(a.len().min(b.len()))?;
        Ok(a.cmp(&b))
    }

    fn ordered_by_meta(
        &mut self,
        left: Value,
        right: Value,
        name: Value,
    ) -> Result<Option<bool>, Stop> {
        let handler = self.meta_of(left, name)?;
        if handler.is_nil() || handler != self.meta_of(right, name)? {
            return Ok(None);
        }
        Ok(Some(self.call_one(handler, &[left, right])?.is_true()))
    }

    fn order_error(&mut self, left: Value, right: Value) -> Stop {
        let (left, right) = (left.type_name(), right.type_name());
        if left == right {
            self.error(&format!("attempt to compare two {left} values"))
        } else {
            self.error(&format!("attempt to compare {left} with {right}"))
        }
    }

    /// The values of several registers, one after the other.
    fn concat(&mut self, first: usize, last: usize) -> Result<Value, Stop> {
        let values: Vec<Value> = (first..=last).map(|at| self.register(at)).collect();
        let is_text = |value: &Value| matches!(value, Value::String(_) | Value::Number(_));
        if values.iter().all(is_text) {
            return self.join(&values);
        }
        // From the right, two at a time.
        let mut values = values;
        let mut right = values.pop().unwrap_or_default();
        let mut at = last;
        while let Some(left) = values.pop() {
            at -= 1;
            right = if is_text(&left) && is_text(&right) {
                self.join(&[left, right])?
            } else {
                let mut handler = self.meta_of(left, self.names.concat)?;
                if handler.is_nil() {
                    handler = self.meta_of(right, self.names.concat)?;
                }
                if handler.is_nil() {
                    let (value, register) =
                        if is_text(&left) { (right, at + 1) } else { (left, at) };
                    return Err(self.type_error("concatenate", value, Some(register)));
                }
                self.call_one(handler, &[left, right])?
            };
        }
        Ok(right)
    }

    fn join(&mut self, values: &[Value]) -> Result<Value, Stop> {
        let mut whole = Vec::new();
        for value in values {
            match *value {
                Value::String(string) => {
                    self.heap.charge_length(self.heap.length(string))?;
                    whole.extend_from_slice(&self.heap.bytes(string));
                }
                Value::Number(number) => {
                    self.heap.charge(NUMBER_WORK)?;
                    whole.extend_from_slice(number::shown(number).as_bytes());
                }
                _ => {}
            }
        }
        self.heap.text(&whole)
    }

    fn length(&mut self, value: Value, register: usize) -> Result<Value, Stop> {
        let length = match value {
            Value::String(string) => self.heap.length(string),
            Value::Table(table) => self.heap.table_length(table),
            Value::Nil
            | Value::Boolean(_)
            | Value::Number(_)
            | Value::Closure(_)
            | Value::Native(_)
            | Value::Host(_)
            | Value::Null => {
                return Err(self.type_error("get length of", value, Some(register)));
            }
        };
        Ok(library::count(length))
    }

    fn negate(&mut self, value: Value, register: usize) -> Result<Value, Stop> {
        if let Some(number) = self.number_of(value) {
            return Ok(Value::Number(-number));
        }
        let handler = self.meta_of(value, self.names.negate)?;
        if handler.is_nil() {
            return Err(self.type_error("perform arithmetic on", value, Some(register)));
        }
        self.call_one(handler, &[value, value])
    }

    // The machine.

    /// Runs until the first function of this run returns.
    fn run(&mut self) -> Result<(), Stop> {
        loop {
            let Some(frame) = self.frames.last() else { return Ok(()) };
            let proto = Rc::clone(&frame.proto);
            let base = frame.base;
            // Until another function runs.
            loop {
                self.heap.charge(OP_WORK)?;
                let Some(frame) = self.frames.last_mut() else { return Ok(()) };
                let Some(op) = proto.code.get(frame.at).copied() else { return Ok(()) };
                frame.at += 1;
                match self.step(op, &proto, base)? {
                    Next::Op => {}
                    Next::Frame => break,
                    Next::End => return Ok(()),
                }
            }
        }
    }

    fn goto(&mut self, target: u32) {
        if let Some(frame) = self.frames.last_mut() {
            frame.at = target as usize;
        }
    }

    #[allow(clippy::too_many_lines, reason = "one arm for each instruction")]
    #[inline]
    fn step(&mut self, op: Op, proto: &Rc<Proto>, base: usize) -> Result<Next, Stop> {
        let a = base + usize::from(op.a);
        let b = base + usize::from(op.b);
        let c = base + usize::from(op.c);
        let constant = || proto.constants.get(op.x as usize).copied().unwrap_or_default();
        let result = match op.code {
            Code::Move => self.register(b),
            Code::Constant => constant(),
            Code::Nil => {
                let end = a + usize::from(op.b);
                if let Some(registers) = self.stack.get_mut(a..end) {
                    registers.fill(Value::Nil);
                }
                return Ok(Next::Op);
            }
            Code::Boolean => Value::Boolean(op.b != 0),
            Code::GetCell => match self.heap.cell(self.captured(op.b)) {
                Cell::Open(position) => self.register(position),
                Cell::Closed(value) => value,
            },
            Code::SetCell => {
                let (cell, value) = (self.captured(op.b), self.register(a));
                match self.heap.cell(cell) {
                    Cell::Open(position) => self.set_register(position, value),
                    Cell::Closed(_) => self.heap.set_cell(cell, Cell::Closed(value)),
                }
                return Ok(Next::Op);
            }
            Code::GetGlobal => self.global(constant())?,
            Code::SetGlobal => {
                let value = self.register(a);
                self.set_index(Value::Table(self.globals), constant(), value, None)?;
                return Ok(Next::Op);
            }
            Code::GetIndex => {
                let key = self.register(c);
                self.index(self.register(b), key, Some(b))?
            }
            Code::GetField => self.index(self.register(b), constant(), Some(b))?,
            Code::SetIndex => {
                let (key, value) = (self.register(c), self.register(a));
                self.set_index(self.register(b), key, value, Some(b))?;
                return Ok(Next::Op);
            }
            Code::SetField => {
                let value = self.register(a);
                self.set_index(self.register(b), constant(), value, Some(b))?;
                return Ok(Next::Op);
            }
            Code::NewTable => Value::Table(self.heap.new_table()?),
            Code::Method => {
                let object = self.register(b);
                let method = self.index(object, constant(), Some(b))?;
                self.set_register(a + 1, object);
                method
            }
            Code::Add => self.binary(Arithmetic::Add, b, c)?,
            Code::Sub => self.binary(Arithmetic::Sub, b, c)?,
            Code::Mul => self.binary(Arithmetic::Mul, b, c)?,
            Code::Div => self.binary(Arithmetic::Div, b, c)?,
            Code::Mod => self.binary(Arithmetic::Mod, b, c)?,
            Code::Pow => self.binary(Arithmetic::Pow, b, c)?,
            Code::AddConstant => self.binary_constant(Arithmetic::Add, b, constant())?,
            Code::SubConstant => self.binary_constant(Arithmetic::Sub, b, constant())?,
            Code::MulConstant => self.binary_constant(Arithmetic::Mul, b, constant())?,
            Code::DivConstant => self.binary_constant(Arithmetic::Div, b, constant())?,
            Code::ModConstant => self.binary_constant(Arithmetic::Mod, b, constant())?,
            Code::PowConstant => self.binary_constant(Arithmetic::Pow, b, constant())?,
            Code::Negate => self.negate(self.register(b), b)?,
            Code::Not => Value::Boolean(!self.register(b).is_true()),
            Code::Length => self.length(self.register(b), b)?,
            Code::Concat => self.concat(b, c)?,
            Code::Jump => {
                self.goto(op.x);
                return Ok(Next::Op);
            }
            Code::JumpIf | Code::JumpIfNot => {
                if self.register(a).is_true() == (op.code == Code::JumpIf) {
                    self.goto(op.x);
                }
                return Ok(Next::Op);
            }
            Code::Equal => Value::Boolean(self.equals(self.register(b), self.register(c))?),
            Code::NotEqual => Value::Boolean(!self.equals(self.register(b), self.register(c))?),
            Code::Less => Value::Boolean(self.less(self.register(b), self.register(c))?),
            Code::LessEqual => Value::Boolean(self.less_equal(self.register(b), self.register(c))?),
            Code::Call => {
                let count = self.count(op.b, a + 1);
                let is_script = self.enter(a, count, op.c)?;
                return Ok(if is_script { Next::Frame } else { Next::Op });
            }
            Code::TailCall => {
                let count = self.count(op.b, a + 1);
                return self.tail_call(a, count);
            }
            Code::Return => {
                let count = self.count(op.b, a);
                let is_end = self.return_from(a, count)?;
                return Ok(if is_end { Next::End } else { Next::Frame });
            }
            Code::ForPrepare => {
                self.prepare_loop(a)?;
                self.goto(op.x);
                return Ok(Next::Op);
            }
            Code::ForLoop => {
                self.next_number(a, op.x);
                return Ok(Next::Op);
            }
            Code::ForCall => {
                for at in 0..3 {
                    let value = self.register(a + at);
                    self.set_register(a + 3 + at, value);
                }
                let is_script = self.enter(a + 3, 2, op.c)?;
                return Ok(if is_script { Next::Frame } else { Next::Op });
            }
            Code::ForNext => {
                let control = self.register(a + 3);
                if !control.is_nil() {
                    self.set_register(a + 2, control);
                    self.goto(op.x);
                }
                return Ok(Next::Op);
            }
            Code::SetList => {
                let count = self.count(op.b, a + 1);
                if let Value::Table(table) = self.register(a) {
                    let values = self.stack.get(a + 1..a + 1 + count).unwrap_or_default().to_vec();
                    self.heap.charge(4 * values.len() as u64)?;
                    self.heap.set_list(table, op.x as usize, &values)?;
                }
                return self.after_open(op.b);
            }
            Code::Closure => self.closure(proto, op.x, base)?,
            Code::Close => {
                self.close(a);
                return Ok(Next::Op);
            }
            Code::Rest => {
                self.rest(a, op.b)?;
                return Ok(Next::Op);
            }
        };
        self.set_register(a, result);
        Ok(Next::Op)
    }

    /// A number of values from a register, or all up to the top.
    fn count(&self, operand: u8, first: usize) -> usize {
        if operand == OPEN { self.top.saturating_sub(first) } else { usize::from(operand) }
    }

    /// The stack may have grown for an open number of values.
    fn after_open(&mut self, operand: u8) -> Result<Next, Stop> {
        if operand == OPEN {
            self.restore(0)?;
        }
        Ok(Next::Op)
    }

    fn captured(&self, number: u8) -> u32 {
        let cells = self.frames.last().map(|frame| &frame.cells);
        cells.and_then(|cells| cells.get(usize::from(number))).copied().unwrap_or(u32::MAX)
    }

    fn global(&mut self, name: Value) -> Result<Value, Stop> {
        let found = self.heap.get(self.globals, name)?;
        if !found.is_nil() {
            return Ok(found);
        }
        let name = name.as_string().map(|name| self.heap.shown(name)).unwrap_or_default();
        Err(self.error(&format!("Script attempted to access nonexistent global variable '{name}'")))
    }

    fn binary(&mut self, how: Arithmetic, b: usize, c: usize) -> Result<Value, Stop> {
        let (left, right) = (self.register(b), self.register(c));
        if let (Value::Number(left), Value::Number(right)) = (left, right) {
            return Ok(Value::Number(how.of(left, right)));
        }
        self.arithmetic(how, (left, Some(b)), (right, Some(c)))
    }

    fn binary_constant(&mut self, how: Arithmetic, b: usize, right: Value) -> Result<Value, Stop> {
        let left = self.register(b);
        if let (Value::Number(left), Value::Number(right)) = (left, right) {
            return Ok(Value::Number(how.of(left, right)));
        }
        self.arithmetic(how, (left, Some(b)), (right, None))
    }

    /// Replaces the function that runs by a call.
    fn tail_call(&mut self, function: usize, count: usize) -> Result<Next, Stop> {
        let Some(frame) = self.frames.last() else { return Ok(Next::End) };
        let (base, to, wanted, is_first) =
            (frame.base, frame.function, frame.wanted, frame.is_first);
        if !matches!(self.register(function), Value::Closure(_)) {
            // The results of a function of the library are returned by the next instruction.
            let is_script = self.enter(function, count, OPEN)?;
            return Ok(if is_script { Next::Frame } else { Next::Op });
        }
        self.close(base);
        for at in 0..=count {
            let value = self.register(function + at);
            self.set_register(to + at, value);
        }
        self.frames.pop();
        if self.enter(to, count, wanted)? {
            if let Some(frame) = self.frames.last_mut() {
                frame.is_first = is_first;
            }
            return Ok(Next::Frame);
        }
        Ok(if is_first { Next::End } else { Next::Frame })
    }

    fn prepare_loop(&mut self, a: usize) -> Result<(), Stop> {
        let errors = [
            "'for' initial value must be a number",
            "'for' limit must be a number",
            "'for' step must be a number",
        ];
        let mut numbers = [0.0; 3];
        for ((at, number), error) in numbers.iter_mut().enumerate().zip(errors) {
            match self.number_of(self.register(a + at)) {
                Some(found) => *number = found,
                None => return Err(self.error(error)),
            }
        }
        let [first, last, step] = numbers;
        for (at, number) in [first - step, last, step].into_iter().enumerate() {
            self.set_register(a + at, Value::Number(number));
        }
        Ok(())
    }

    fn next_number(&mut self, a: usize, target: u32) {
        let number = |value: Value| if let Value::Number(number) = value { number } else { 0.0 };
        let step = number(self.register(a + 2));
        let next = number(self.register(a)) + step;
        let last = number(self.register(a + 1));
        if if step > 0.0 { next <= last } else { last <= next } {
            self.set_register(a, Value::Number(next));
            self.set_register(a + 3, Value::Number(next));
            self.goto(target);
        }
    }

    fn closure(&mut self, proto: &Proto, number: u32, base: usize) -> Result<Value, Stop> {
        let Some(inner) = proto.protos.get(number as usize) else { return Ok(Value::Nil) };
        let mut cells = Vec::with_capacity(inner.captures.len());
        for capture in &inner.captures {
            cells.push(match capture {
                Capture::Register(register) => self.capture(base + usize::from(*register))?,
                Capture::Cell(cell) => self.captured(*cell),
            });
        }
        self.heap.new_closure(Closure::Script { proto: Rc::clone(inner), cells: cells.into() })
    }

    fn rest(&mut self, a: usize, wanted: u8) -> Result<(), Stop> {
        let (from, have) = self.frames.last().map_or((0, 0), |frame| frame.rest);
        let count = if wanted == OPEN { have } else { usize::from(wanted) };
        self.heap.charge(4 * count as u64)?;
        self.extend(a + count)?;
        for at in 0..count {
            let value = if at < have { self.register(from + at) } else { Value::Nil };
            self.set_register(a + at, value);
        }
        if wanted == OPEN {
            self.top = a + count;
        }
        Ok(())
    }
}

/// What follows an instruction.
enum Next {
    /// The next instruction of the function.
    Op,
    /// Another function runs.
    Frame,
    /// The first function of the run has returned.
    End,
}
