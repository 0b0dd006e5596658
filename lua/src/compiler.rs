//! Compiles a script in one pass, as Lua 5.1 does: the parser emits code for a machine with
//! registers. What nests is bounded, because the parser calls itself.

#![allow(clippy::disallowed_types, reason = "`core`, which has other maps, depends on this crate")]

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::code::{Capture, Code, Name, OPEN, Op, Proto};
use crate::heap::{Heap, Stop};
use crate::lexer::{Lexer, Refusal, Token};
use crate::value::{StringId, Value};

/// How deeply a script may nest, as in Lua 5.1.
const LEVELS_MAX: u32 = 200;
const LOCALS_MAX: usize = 200;
const CAPTURES_MAX: usize = 60;
const REGISTERS_MAX: usize = 250;
/// The work of reading one byte of a script. It also bounds the memory of the code.
const BYTE_WORK: u64 = 16;
/// Elements of a list that are collected in registers before they are put into their table.
const LIST_BATCH: usize = 50;

type Result<T> = std::result::Result<T, Refusal>;

/// Where the value of an expression is.
#[derive(Clone, Copy, Debug)]
enum Exp {
    Nil,
    Boolean(bool),
    Number(f64),
    String(StringId),
    /// In a register.
    Register(u8),
    /// In the register of a variable.
    Local(u8),
    Captured(u8),
    Global(StringId),
    /// An element of a table.
    Element {
        table: u8,
        key: Key,
        name: Option<Name>,
    },
    /// The instruction at this position puts it into a register that is not chosen yet.
    Pending(usize),
    /// The call at this position leaves it.
    Call(usize),
    /// The instruction at this position gives the rest of the arguments.
    Rest(usize),
}

#[derive(Clone, Copy, Debug)]
enum Key {
    Register(u8),
    Constant(u32),
}

/// What a jump over a block must know.
#[derive(Debug, Default)]
struct Block {
    /// Variables before it.
    locals: usize,
    is_loop: bool,
    /// A function inside keeps a variable of it.
    is_captured: bool,
    /// Jumps out of the loop.
    breaks: Vec<usize>,
}

/// A function that is being compiled.
#[derive(Default)]
struct Function {
    proto: Proto,
    constants: BTreeMap<(u8, u64), u32>,
    /// The variables in scope, in registers from 0.
    locals: Vec<StringId>,
    captures: Vec<(StringId, Capture)>,
    blocks: Vec<Block>,
    /// The first free register.
    free: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Binary {
    Arithmetic(Code, Code),
    Concat,
    Equal(Code),
    /// And whether the operands change places.
    Order(Code, bool),
    And,
    Or,
}

/// An operator with its priority to the left and to the right.
type Operator = (Binary, u32, u32);

fn binary(token: Token) -> Option<Operator> {
    let Token::Word(word) = token else { return None };
    Some(match word {
        "or" => (Binary::Or, 1, 1),
        "and" => (Binary::And, 2, 2),
        "<" => (Binary::Order(Code::Less, false), 3, 3),
        ">" => (Binary::Order(Code::Less, true), 3, 3),
        "<=" => (Binary::Order(Code::LessEqual, false), 3, 3),
        ">=" => (Binary::Order(Code::LessEqual, true), 3, 3),
        "==" => (Binary::Equal(Code::Equal), 3, 3),
        "~=" => (Binary::Equal(Code::NotEqual), 3, 3),
        ".." => (Binary::Concat, 5, 4),
        "+" => (Binary::Arithmetic(Code::Add, Code::AddConstant), 6, 6),
        "-" => (Binary::Arithmetic(Code::Sub, Code::SubConstant), 6, 6),
        "*" => (Binary::Arithmetic(Code::Mul, Code::MulConstant), 7, 7),
        "/" => (Binary::Arithmetic(Code::Div, Code::DivConstant), 7, 7),
        "%" => (Binary::Arithmetic(Code::Mod, Code::ModConstant), 7, 7),
        "^" => (Binary::Arithmetic(Code::Pow, Code::PowConstant), 10, 9),
        _ => return None,
    })
}

const UNARY_PRIORITY: u32 = 8;

fn small(number: usize) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

fn wide(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Compiles the text of a script.
pub(crate) fn compile(heap: &mut Heap, text: &[u8], chunk: &str) -> Result<Rc<Proto>> {
    heap.charge((text.len() as u64).saturating_mul(BYTE_WORK)).map_err(Refusal::from)?;
    let lexer = Lexer::new(text, chunk);
    let (token, ahead, functions) = (Token::End, None, Vec::new());
    let mut parser =
        Parser { lexer, heap, token, ahead, line: 1, token_line: 1, functions, levels: 0 };
    parser.functions.push(Function::default());
    parser.function().proto.has_rest = true;
    parser.advance()?;
    parser.enter_block(false);
    parser.chunk()?;
    if parser.token != Token::End {
        return Err(parser.expected("<eof>"));
    }
    parser.leave_block()?;
    parser.finish()
}

struct Parser<'a, 'h> {
    lexer: Lexer<'a>,
    heap: &'h mut Heap,
    token: Token,
    ahead: Option<(Token, u32)>,
    /// The line of the word before the present one.
    line: u32,
    token_line: u32,
    functions: Vec<Function>,
    levels: u32,
}

impl Parser<'_, '_> {
    // Words.

    fn advance(&mut self) -> Result<()> {
        self.line = self.token_line;
        (self.token, self.token_line) = match self.ahead.take() {
            Some(ahead) => ahead,
            None => (self.lexer.next(self.heap)?, self.lexer.line),
        };
        Ok(())
    }

    fn look_ahead(&mut self) -> Result<Token> {
        let token = self.lexer.next(self.heap)?;
        self.ahead = Some((token, self.lexer.line));
        Ok(token)
    }

    fn is(&self, word: &str) -> bool {
        matches!(self.token, Token::Word(own) if own == word)
    }

    fn takes(&mut self, word: &str) -> Result<bool> {
        let is = self.is(word);
        if is {
            self.advance()?;
        }
        Ok(is)
    }

    fn error(&mut self, what: &str) -> Refusal {
        self.lexer.line = self.token_line;
        self.lexer.error(what, &Lexer::shown(self.token, self.heap))
    }

    fn expected(&mut self, word: &str) -> Refusal {
        self.error(&format!("'{word}' expected"))
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        if self.takes(word)? { Ok(()) } else { Err(self.expected(word)) }
    }

    /// Expects the end of what began with `opening` at `line`.
    fn close(&mut self, word: &str, opening: &str, line: u32) -> Result<()> {
        if self.takes(word)? {
            return Ok(());
        }
        if line == self.token_line {
            return Err(self.expected(word));
        }
        Err(self.error(&format!("'{word}' expected (to close '{opening}' at line {line})")))
    }

    fn name(&mut self) -> Result<StringId> {
        if let Token::Name(name) = self.token {
            self.advance()?;
            return Ok(name);
        }
        Err(self.expected("<name>"))
    }

    fn limit(&mut self, what: &str, most: usize) -> Refusal {
        self.lexer.line = self.token_line;
        self.lexer.error(&format!("function has more than {most} {what}"), "")
    }

    fn enter(&mut self) -> Result<()> {
        self.levels += 1;
        if self.levels > LEVELS_MAX {
            self.lexer.line = self.token_line;
            return Err(self.lexer.error("chunk has too many syntax levels", ""));
        }
        Ok(())
    }

    // Code.

    fn function(&mut self) -> &mut Function {
        if self.functions.is_empty() {
            self.functions.push(Function::default());
        }
        let last = self.functions.len() - 1;
        #[allow(clippy::indexing_slicing, reason = "made above if there was none")]
        &mut self.functions[last]
    }

    fn emit_at(&mut self, line: u32, code: Code, (a, b, c): (u8, u8, u8), x: u32) -> usize {
        let proto = &mut self.function().proto;
        proto.code.push(Op { code, a, b, c, x });
        proto.lines.push(line);
        proto.code.len() - 1
    }

    fn emit(&mut self, code: Code, registers: (u8, u8, u8), x: u32) -> usize {
        self.emit_at(self.line, code, registers, x)
    }

    fn here(&mut self) -> usize {
        self.function().proto.code.len()
    }

    fn op(&mut self, at: usize) -> Option<&mut Op> {
        self.function().proto.code.get_mut(at)
    }

    fn set_a(&mut self, at: usize, a: u8) {
        if let Some(op) = self.op(at) {
            op.a = a;
        }
    }

    fn jump_to(&mut self, at: usize, target: usize) {
        if let Some(op) = self.op(at) {
            op.x = wide(target);
        }
    }

    fn jump_here(&mut self, at: usize) {
        let here = self.here();
        self.jump_to(at, here);
    }

    fn jump(&mut self) -> usize {
        self.emit(Code::Jump, (0, 0, 0), 0)
    }

    fn reserve(&mut self, count: usize) -> Result<u8> {
        let function = self.function();
        let first = function.free;
        function.free += count;
        let free = function.free;
        function.proto.registers = function.proto.registers.max(free);
        if free > REGISTERS_MAX {
            self.lexer.line = self.token_line;
            return Err(self.lexer.error("function or expression too complex", ""));
        }
        Ok(small(first))
    }

    /// Frees a register, unless it is a variable's.
    fn release(&mut self, register: u8) {
        let function = self.function();
        if usize::from(register) >= function.locals.len() {
            function.free = function.free.min(usize::from(register));
        }
    }

    fn free_exp(&mut self, exp: Exp) {
        if let Exp::Register(register) = exp {
            self.release(register);
        }
    }

    fn constant(&mut self, value: Value) -> u32 {
        let key = match value {
            Value::Number(number) => (0, number.to_bits()),
            Value::String(string) => (1, u64::from(string.0)),
            Value::Boolean(is_true) => (2, u64::from(is_true)),
            Value::Nil
            | Value::Table(_)
            | Value::Closure(_)
            | Value::Native(_)
            | Value::Host(_)
            | Value::Null => (3, 0),
        };
        let function = self.function();
        if let Some(known) = function.constants.get(&key) {
            return *known;
        }
        let number = wide(function.proto.constants.len());
        function.proto.constants.push(value);
        function.constants.insert(key, number);
        number
    }

    fn note(&mut self, at: usize, register: u8, name: Option<Name>) {
        if let Some(name) = name {
            self.function().proto.names.insert((wide(at), register), name);
        }
    }

    /// What the source calls the value of an expression.
    fn name_of(&mut self, exp: Exp) -> Option<Name> {
        match exp {
            Exp::Local(register) => {
                let name = self.function().locals.get(usize::from(register)).copied();
                name.map(|name| ("local", name))
            }
            Exp::Captured(cell) => {
                let name = self.function().captures.get(usize::from(cell)).copied();
                name.map(|(name, _)| ("upvalue", name))
            }
            Exp::Global(name) => Some(("global", name)),
            Exp::Element { key: Key::Constant(constant), .. } => {
                let key = self.function().proto.constants.get(constant as usize).copied();
                key.and_then(Value::as_string).map(|key| ("field", key))
            }
            Exp::Element { .. }
            | Exp::Nil
            | Exp::Boolean(_)
            | Exp::Number(_)
            | Exp::String(_)
            | Exp::Register(_)
            | Exp::Pending(_)
            | Exp::Call(_)
            | Exp::Rest(_) => None,
        }
    }

    /// Emits what reads a variable.
    fn read(&mut self, exp: Exp) -> Exp {
        match exp {
            Exp::Local(register) => Exp::Register(register),
            Exp::Captured(cell) => Exp::Pending(self.emit(Code::GetCell, (0, cell, 0), 0)),
            Exp::Global(name) => {
                let name = self.constant(Value::String(name));
                Exp::Pending(self.emit(Code::GetGlobal, (0, 0, 0), name))
            }
            Exp::Element { table, key, name } => {
                let at = match key {
                    Key::Register(key) => {
                        // The higher one first, so that both are free.
                        self.release(key.max(table));
                        self.release(key.min(table));
                        self.emit(Code::GetIndex, (0, table, key), 0)
                    }
                    Key::Constant(key) => {
                        self.release(table);
                        self.emit(Code::GetField, (0, table, 0), key)
                    }
                };
                self.note(at, table, name);
                Exp::Pending(at)
            }
            Exp::Call(at) => {
                let register = self.op(at).map_or(0, |op| {
                    op.c = 1;
                    op.a
                });
                Exp::Register(register)
            }
            Exp::Rest(at) => {
                if let Some(op) = self.op(at) {
                    op.b = 1;
                }
                Exp::Pending(at)
            }
            Exp::Nil
            | Exp::Boolean(_)
            | Exp::Number(_)
            | Exp::String(_)
            | Exp::Register(_)
            | Exp::Pending(_) => exp,
        }
    }

    /// Puts a value into this register.
    fn put(&mut self, exp: Exp, to: u8) {
        match self.read(exp) {
            Exp::Nil => {
                self.emit(Code::Nil, (to, 1, 0), 0);
            }
            Exp::Boolean(is_true) => {
                self.emit(Code::Boolean, (to, u8::from(is_true), 0), 0);
            }
            Exp::Number(number) => {
                let constant = self.constant(Value::Number(number));
                self.emit(Code::Constant, (to, 0, 0), constant);
            }
            Exp::String(string) => {
                let constant = self.constant(Value::String(string));
                self.emit(Code::Constant, (to, 0, 0), constant);
            }
            Exp::Pending(at) => self.set_a(at, to),
            Exp::Register(from) | Exp::Local(from) if from != to => {
                self.emit(Code::Move, (to, from, 0), 0);
            }
            Exp::Register(_)
            | Exp::Local(_)
            | Exp::Captured(_)
            | Exp::Global(_)
            | Exp::Element { .. }
            | Exp::Call(_)
            | Exp::Rest(_) => {}
        }
    }

    /// Puts a value into the next free register.
    fn push(&mut self, exp: Exp) -> Result<u8> {
        let exp = self.read(exp);
        self.free_exp(exp);
        let to = self.reserve(1)?;
        self.put(exp, to);
        Ok(to)
    }

    /// Puts a value into some register.
    fn in_register(&mut self, exp: Exp) -> Result<u8> {
        match self.read(exp) {
            Exp::Register(register) => Ok(register),
            other => self.push(other),
        }
    }

    // Blocks and variables.

    fn enter_block(&mut self, is_loop: bool) {
        let function = self.function();
        let locals = function.locals.len();
        function.blocks.push(Block { locals, is_loop, ..Block::default() });
    }

    /// Ends the variables of a block. Its breaks go to what follows.
    fn leave_block(&mut self) -> Result<()> {
        let block = self.function().blocks.pop().unwrap_or_default();
        self.function().locals.truncate(block.locals);
        if block.is_captured {
            self.emit(Code::Close, (small(block.locals), 0, 0), 0);
        }
        self.function().free = block.locals;
        for at in block.breaks {
            self.jump_here(at);
        }
        Ok(())
    }

    /// Makes the values in the registers from the last variable on variables.
    fn declare(&mut self, names: &[StringId]) -> Result<()> {
        let function = self.function();
        function.locals.extend_from_slice(names);
        if function.locals.len() > LOCALS_MAX {
            return Err(self.limit("local variables", LOCALS_MAX));
        }
        Ok(())
    }

    fn hidden(&mut self, name: &str) -> Result<StringId> {
        Ok(self.heap.string(name.as_bytes())?)
    }

    /// Finds a variable: in this function, or around it.
    fn variable(&mut self, name: StringId) -> Result<Exp> {
        let innermost = self.functions.len() - 1;
        let local = |function: &Function| function.locals.iter().rposition(|own| *own == name);
        if let Some(register) = self.functions.get(innermost).and_then(local) {
            return Ok(Exp::Local(small(register)));
        }
        // The innermost function around that has it, as a variable or as a captured one.
        let mut found = None;
        for (level, function) in self.functions.iter_mut().enumerate().rev() {
            if level != innermost
                && let Some(register) = local(function)
            {
                let mut blocks = function.blocks.iter_mut().rev();
                if let Some(block) = blocks.find(|block| block.locals <= register) {
                    block.is_captured = true;
                }
                found = Some((level, Capture::Register(small(register))));
                break;
            }
            let known = function.captures.iter().position(|(own, _)| *own == name);
            if let Some(known) = known {
                found = Some((level, Capture::Cell(small(known))));
                break;
            }
        }
        let Some((level, mut capture)) = found else { return Ok(Exp::Global(name)) };
        if level == innermost
            && let Capture::Cell(cell) = capture
        {
            return Ok(Exp::Captured(cell));
        }
        let mut is_full = false;
        for function in self.functions.iter_mut().skip(level + 1) {
            function.captures.push((name, capture));
            is_full |= function.captures.len() > CAPTURES_MAX;
            capture = Capture::Cell(small(function.captures.len() - 1));
        }
        if is_full {
            return Err(self.limit("upvalues", CAPTURES_MAX));
        }
        match capture {
            Capture::Cell(cell) => Ok(Exp::Captured(cell)),
            Capture::Register(register) => Ok(Exp::Local(register)),
        }
    }

    /// The code of the innermost function, which ends.
    fn finish(&mut self) -> Result<Rc<Proto>> {
        self.emit(Code::Return, (0, 0, 0), 0);
        let mut function = self.functions.pop().unwrap_or_default();
        function.proto.captures = function.captures.iter().map(|(_, capture)| *capture).collect();
        // Room for the function that a loop calls, and so on.
        function.proto.registers += 4;
        Ok(Rc::new(function.proto))
    }

    // Statements.

    fn ends_block(&self) -> bool {
        match self.token {
            Token::End => true,
            Token::Word(word) => matches!(word, "else" | "elseif" | "end" | "until"),
            Token::Name(_) | Token::String(_) | Token::Number(_) => false,
        }
    }

    fn chunk(&mut self) -> Result<()> {
        self.enter()?;
        let mut is_last = false;
        while !is_last && !self.ends_block() {
            is_last = self.statement()?;
            self.takes(";")?;
            let function = self.function();
            function.free = function.locals.len();
        }
        self.levels -= 1;
        Ok(())
    }

    fn block(&mut self) -> Result<()> {
        self.enter_block(false);
        self.chunk()?;
        self.leave_block()
    }

    /// Compiles a statement; true if it must be the last one of its block.
    fn statement(&mut self) -> Result<bool> {
        let line = self.token_line;
        let Token::Word(word) = self.token else {
            self.expression_statement()?;
            return Ok(false);
        };
        match word {
            "if" => self.if_statement(line)?,
            "while" => self.while_statement(line)?,
            "do" => {
                self.advance()?;
                self.block()?;
                self.close("end", "do", line)?;
            }
            "for" => self.for_statement(line)?,
            "repeat" => self.repeat_statement(line)?,
            "function" => self.function_statement(line)?,
            "local" => {
                self.advance()?;
                if self.takes("function")? { self.local_function()? } else { self.local()? }
            }
            "return" => {
                self.return_statement()?;
                return Ok(true);
            }
            "break" => {
                self.advance()?;
                self.break_statement()?;
                return Ok(true);
            }
            _ => self.expression_statement()?,
        }
        Ok(false)
    }

    /// Compiles a condition; the jump that is taken if it does not hold.
    fn condition(&mut self) -> Result<usize> {
        let exp = self.expression()?;
        let register = self.in_register(exp)?;
        self.release(register);
        Ok(self.emit(Code::JumpIfNot, (register, 0, 0), 0))
    }

    fn if_statement(&mut self, line: u32) -> Result<()> {
        let mut ends = Vec::new();
        loop {
            // `if` or `elseif`
            self.advance()?;
            let otherwise = self.condition()?;
            self.expect("then")?;
            self.block()?;
            if self.is("else") || self.is("elseif") {
                ends.push(self.jump());
            }
            self.jump_here(otherwise);
            if !self.is("elseif") {
                break;
            }
        }
        if self.takes("else")? {
            self.block()?;
        }
        self.close("end", "if", line)?;
        for end in ends {
            self.jump_here(end);
        }
        Ok(())
    }

    fn while_statement(&mut self, line: u32) -> Result<()> {
        self.advance()?;
        let start = self.here();
        let exit = self.condition()?;
        self.enter_block(true);
        self.expect("do")?;
        self.block()?;
        let back = self.jump();
        self.jump_to(back, start);
        self.close("end", "while", line)?;
        self.jump_here(exit);
        self.leave_block()
    }

    fn repeat_statement(&mut self, line: u32) -> Result<()> {
        self.advance()?;
        let start = self.here();
        self.enter_block(true);
        self.enter_block(false);
        self.chunk()?;
        self.close("until", "repeat", line)?;
        let again = self.condition()?;
        let inner = self.function().blocks.last();
        let (is_captured, locals) = inner.map_or((false, 0), |own| (own.is_captured, own.locals));
        if is_captured {
            let done = self.jump();
            self.jump_here(again);
            self.emit(Code::Close, (small(locals), 0, 0), 0);
            let back = self.jump();
            self.jump_to(back, start);
            self.jump_here(done);
        } else {
            self.jump_to(again, start);
        }
        self.leave_block()?;
        self.leave_block()
    }

    fn break_statement(&mut self) -> Result<()> {
        let mut blocks = self.function().blocks.iter().enumerate().rev();
        let found = blocks.find(|(_, block)| block.is_loop);
        let found = found.map(|(at, block)| (at, block.locals));
        let Some((at, locals)) = found else { return Err(self.error("no loop to break")) };
        // Whether a function captures a variable may not be known yet.
        self.emit(Code::Close, (small(locals), 0, 0), 0);
        let jump = self.jump();
        if let Some(block) = self.function().blocks.get_mut(at) {
            block.breaks.push(jump);
        }
        Ok(())
    }

    fn for_statement(&mut self, line: u32) -> Result<()> {
        self.advance()?;
        self.enter_block(true);
        let name = self.name()?;
        if self.is("=") {
            self.numeric_for(name, line)?;
        } else if self.is(",") || self.is("in") {
            self.generic_for(name, line)?;
        } else {
            return Err(self.error("'=' or 'in' expected"));
        }
        self.close("end", "for", line)?;
        self.leave_block()
    }

    fn numeric_for(&mut self, name: StringId, line: u32) -> Result<()> {
        self.advance()?;
        let first = self.expression()?;
        let base = self.push(first)?;
        self.expect(",")?;
        let last = self.expression()?;
        self.push(last)?;
        let step = if self.takes(",")? { self.expression()? } else { Exp::Number(1.0) };
        self.push(step)?;
        let hidden = [self.hidden("(for index)")?, self.hidden("(for limit)")?];
        let step = self.hidden("(for step)")?;
        self.declare(&[hidden[0], hidden[1], step])?;
        let prepare = self.emit_at(line, Code::ForPrepare, (base, 0, 0), 0);
        self.for_body(&[name])?;
        let next = self.emit_at(line, Code::ForLoop, (base, 0, 0), wide(prepare + 1));
        self.jump_to(prepare, next);
        Ok(())
    }

    fn generic_for(&mut self, first: StringId, line: u32) -> Result<()> {
        let mut names = vec![first];
        while self.takes(",")? {
            names.push(self.name()?);
        }
        self.expect("in")?;
        let base = small(self.function().free);
        let (count, last) = self.expressions()?;
        self.adjust(3, count, last)?;
        let hidden = self.hidden("(for generator)")?;
        let state = self.hidden("(for state)")?;
        let control = self.hidden("(for control)")?;
        self.declare(&[hidden, state, control])?;
        // Room for a call.
        self.reserve(3)?;
        self.function().free -= 3;
        let start = self.jump();
        self.for_body(&names)?;
        self.jump_here(start);
        self.emit_at(line, Code::ForCall, (base, 0, small(names.len())), 0);
        self.emit_at(line, Code::ForNext, (base, 0, 0), wide(start + 1));
        Ok(())
    }

    fn for_body(&mut self, names: &[StringId]) -> Result<()> {
        self.expect("do")?;
        self.enter_block(false);
        self.reserve(names.len())?;
        self.declare(names)?;
        self.block()?;
        self.leave_block()
    }

    fn function_statement(&mut self, line: u32) -> Result<()> {
        self.advance()?;
        let name = self.name()?;
        let mut target = self.variable(name)?;
        let mut is_method = false;
        while self.is(".") || self.is(":") {
            is_method = self.is(":");
            self.advance()?;
            target = self.field(target)?;
            if is_method {
                break;
            }
        }
        let body = self.body(is_method, line)?;
        self.store(target, body)
    }

    fn local_function(&mut self) -> Result<()> {
        let name = self.name()?;
        // It knows itself.
        let register = self.reserve(1)?;
        self.declare(&[name])?;
        let body = self.body(false, self.token_line)?;
        self.put(body, register);
        Ok(())
    }

    fn local(&mut self) -> Result<()> {
        let mut names = vec![self.name()?];
        while self.takes(",")? {
            names.push(self.name()?);
        }
        if self.takes("=")? {
            let (count, last) = self.expressions()?;
            self.adjust(names.len(), count, last)?;
        } else {
            let first = self.reserve(names.len())?;
            self.emit(Code::Nil, (first, small(names.len()), 0), 0);
        }
        self.declare(&names)
    }

    fn return_statement(&mut self) -> Result<()> {
        self.advance()?;
        if self.ends_block() || self.is(";") {
            self.emit(Code::Return, (0, 0, 0), 0);
            return Ok(());
        }
        let first = small(self.function().free);
        let (count, last) = self.expressions()?;
        match last {
            Exp::Call(at) if count == 1 => {
                if let Some(op) = self.op(at) {
                    op.code = Code::TailCall;
                    op.c = OPEN;
                }
                self.emit(Code::Return, (first, OPEN, 0), 0);
            }
            Exp::Call(_) | Exp::Rest(_) => {
                self.open(last)?;
                self.emit(Code::Return, (first, OPEN, 0), 0);
            }
            _ if count == 1 => {
                let register = self.in_register(last)?;
                self.emit(Code::Return, (register, 1, 0), 0);
            }
            _ => {
                self.push(last)?;
                self.emit(Code::Return, (first, small(count), 0), 0);
            }
        }
        Ok(())
    }

    /// Leaves all values of a call or of the rest of the arguments, from the next free register.
    fn open(&mut self, exp: Exp) -> Result<()> {
        match exp {
            Exp::Call(at) => {
                if let Some(op) = self.op(at) {
                    op.c = OPEN;
                }
            }
            Exp::Rest(at) => {
                let register = self.reserve(1)?;
                if let Some(op) = self.op(at) {
                    (op.a, op.b) = (register, OPEN);
                }
            }
            Exp::Nil
            | Exp::Boolean(_)
            | Exp::Number(_)
            | Exp::String(_)
            | Exp::Register(_)
            | Exp::Local(_)
            | Exp::Captured(_)
            | Exp::Global(_)
            | Exp::Element { .. }
            | Exp::Pending(_) => {}
        }
        Ok(())
    }

    /// Compiles a list of expressions. All but the last are in registers, one after the other.
    fn expressions(&mut self) -> Result<(usize, Exp)> {
        let mut count = 1;
        let mut last = self.expression()?;
        while self.takes(",")? {
            self.push(last)?;
            last = self.expression()?;
            count += 1;
        }
        Ok((count, last))
    }

    /// Makes a list of `count` expressions `wanted` registers.
    fn adjust(&mut self, wanted: usize, count: usize, last: Exp) -> Result<()> {
        if matches!(last, Exp::Call(_) | Exp::Rest(_)) {
            let more = (wanted + 1).saturating_sub(count);
            match last {
                Exp::Call(at) => {
                    if let Some(op) = self.op(at) {
                        op.c = small(more);
                    }
                    // The first one is where the function was.
                    if more > 1 {
                        self.reserve(more - 1)?;
                    }
                }
                Exp::Rest(at) => {
                    let first = self.reserve(more.max(1))?;
                    if let Some(op) = self.op(at) {
                        (op.a, op.b) = (first, small(more));
                    }
                }
                _ => {}
            }
        } else {
            self.push(last)?;
            if wanted > count {
                let first = self.reserve(wanted - count)?;
                self.emit(Code::Nil, (first, small(wanted - count), 0), 0);
            }
        }
        if count > wanted {
            let extra = count - wanted;
            self.function().free -= extra.min(self.function().free);
        }
        Ok(())
    }

    /// Assigns, or calls.
    fn expression_statement(&mut self) -> Result<()> {
        let first = self.suffixed()?;
        if let Exp::Call(at) = first {
            if let Some(op) = self.op(at) {
                op.c = 0;
            }
            return Ok(());
        }
        if self.is("=") {
            self.advance()?;
            let exp = self.expression()?;
            // More values than variables.
            if !self.is(",") {
                return self.store(first, exp);
            }
            self.push(exp)?;
            self.advance()?;
            let (count, last) = self.expressions()?;
            self.adjust(1, count + 1, last)?;
            let value = small(self.function().free.saturating_sub(1));
            return self.store(first, Exp::Register(value));
        }
        if !self.is(",") {
            return Err(self.expected("="));
        }
        let mut targets = vec![self.pinned(first)?];
        while self.takes(",")? {
            self.enter()?;
            let target = self.suffixed()?;
            targets.push(self.pinned(target)?);
        }
        self.levels -= wide(targets.len() - 1);
        self.expect("=")?;
        let base = self.function().free;
        let (count, last) = self.expressions()?;
        self.adjust(targets.len(), count, last)?;
        for (at, target) in targets.into_iter().enumerate().rev() {
            self.store(target, Exp::Register(small(base + at)))?;
        }
        Ok(())
    }

    /// A target of several assignments: what it names is not changed by the others.
    fn pinned(&mut self, target: Exp) -> Result<Exp> {
        match target {
            Exp::Element { table, key, name } => {
                let locals = self.function().locals.len();
                let pin = |parser: &mut Self, register: u8| -> Result<u8> {
                    if usize::from(register) >= locals {
                        return Ok(register);
                    }
                    let to = parser.reserve(1)?;
                    parser.emit(Code::Move, (to, register, 0), 0);
                    Ok(to)
                };
                let table = pin(self, table)?;
                let key = match key {
                    Key::Register(key) => Key::Register(pin(self, key)?),
                    Key::Constant(key) => Key::Constant(key),
                };
                Ok(Exp::Element { table, key, name })
            }
            Exp::Local(_) | Exp::Captured(_) | Exp::Global(_) => Ok(target),
            _ => Err(self.error("syntax error")),
        }
    }

    /// Assigns a value to a variable or an element.
    fn store(&mut self, target: Exp, value: Exp) -> Result<()> {
        match target {
            Exp::Local(register) => {
                let value = self.read(value);
                self.free_exp(value);
                self.put(value, register);
            }
            Exp::Captured(cell) => {
                let from = self.in_register(value)?;
                self.emit(Code::SetCell, (from, cell, 0), 0);
                self.release(from);
            }
            Exp::Global(name) => {
                let from = self.in_register(value)?;
                let name = self.constant(Value::String(name));
                self.emit(Code::SetGlobal, (from, 0, 0), name);
                self.release(from);
            }
            Exp::Element { table, key, name } => {
                let from = self.in_register(value)?;
                let at = match key {
                    Key::Register(key) => self.emit(Code::SetIndex, (from, table, key), 0),
                    Key::Constant(key) => self.emit(Code::SetField, (from, table, 0), key),
                };
                self.note(at, table, name);
                self.release(from);
            }
            _ => return Err(self.error("syntax error")),
        }
        Ok(())
    }

    // Expressions.

    fn expression(&mut self) -> Result<Exp> {
        Ok(self.operation(0)?.0)
    }

    /// Compiles what binds tighter than `limit`; returns the operator that follows, too.
    fn operation(&mut self, limit: u32) -> Result<(Exp, Option<Operator>)> {
        self.enter()?;
        let unary = ["not", "-", "#"].into_iter().find(|word| self.is(word));
        let mut exp = match unary {
            Some(word) => {
                self.advance()?;
                let line = self.line;
                let (operand, _) = self.operation(UNARY_PRIORITY)?;
                self.unary(word, operand, line)?
            }
            None => self.simple()?,
        };
        let mut next = binary(self.token);
        while let Some((operator, left, right)) = next
            && left > limit
        {
            self.advance()?;
            let line = self.line;
            let (prepared, name, skip) = self.before(operator, exp)?;
            let (second, after) = self.operation(right)?;
            exp = self.after(operator, (prepared, name, skip), second, line)?;
            next = after;
        }
        self.levels -= 1;
        Ok((exp, next))
    }

    fn unary(&mut self, word: &str, operand: Exp, line: u32) -> Result<Exp> {
        let code = match (word, operand) {
            ("-", Exp::Number(number)) => return Ok(Exp::Number(-number)),
            ("not", Exp::Nil | Exp::Boolean(false)) => return Ok(Exp::Boolean(true)),
            ("not", Exp::Boolean(true) | Exp::Number(_) | Exp::String(_)) => {
                return Ok(Exp::Boolean(false));
            }
            ("-", _) => Code::Negate,
            ("not", _) => Code::Not,
            _ => Code::Length,
        };
        let name = self.name_of(operand);
        let register = self.in_register(operand)?;
        self.release(register);
        let at = self.emit_at(line, code, (0, register, 0), 0);
        self.note(at, register, name);
        Ok(Exp::Pending(at))
    }

    /// Prepares the first operand of an operator; the jump that skips the second one, too.
    fn before(&mut self, operator: Binary, exp: Exp) -> Result<(Exp, Option<Name>, Option<usize>)> {
        let name = self.name_of(exp);
        match operator {
            Binary::And | Binary::Or => {
                let register = self.push(exp)?;
                let code = if operator == Binary::And { Code::JumpIfNot } else { Code::JumpIf };
                let skip = self.emit(code, (register, 0, 0), 0);
                self.release(register);
                Ok((Exp::Register(register), None, Some(skip)))
            }
            Binary::Concat => Ok((Exp::Register(self.push(exp)?), name, None)),
            Binary::Arithmetic(..) | Binary::Equal(_) | Binary::Order(..) => {
                Ok((Exp::Register(self.in_register(exp)?), name, None))
            }
        }
    }

    fn after(
        &mut self,
        operator: Binary,
        (first, first_name, skip): (Exp, Option<Name>, Option<usize>),
        second: Exp,
        line: u32,
    ) -> Result<Exp> {
        let Exp::Register(a) = first else { return Ok(first) };
        let second_name = self.name_of(second);
        match operator {
            Binary::And | Binary::Or => {
                // The first operand is given up, so the second one takes its register.
                let second = self.read(second);
                self.free_exp(second);
                let to = self.reserve(1)?;
                self.put(second, to);
                if let Some(skip) = skip {
                    self.jump_here(skip);
                }
                Ok(Exp::Register(to))
            }
            Binary::Concat => {
                if let Exp::Pending(at) = second
                    && let Some(op) = self.op(at)
                    && op.code == Code::Concat
                    && op.b == a + 1
                {
                    op.b = a;
                    self.note(at, a, first_name);
                    self.release(a);
                    return Ok(Exp::Pending(at));
                }
                let b = self.push(second)?;
                self.release(a);
                let at = self.emit_at(line, Code::Concat, (0, a, b), 0);
                self.note(at, a, first_name);
                self.note(at, b, second_name);
                Ok(Exp::Pending(at))
            }
            Binary::Arithmetic(_, code) if matches!(second, Exp::Number(_)) => {
                let Exp::Number(number) = second else { return Ok(first) };
                let constant = self.constant(Value::Number(number));
                self.release(a);
                let at = self.emit_at(line, code, (0, a, 0), constant);
                self.note(at, a, first_name);
                Ok(Exp::Pending(at))
            }
            Binary::Arithmetic(code, _) | Binary::Equal(code) | Binary::Order(code, _) => {
                let b = self.in_register(second)?;
                self.release(a.max(b));
                self.release(a.min(b));
                let is_swapped = matches!(operator, Binary::Order(_, true));
                let (left, right) = if is_swapped { (b, a) } else { (a, b) };
                let at = self.emit_at(line, code, (0, left, right), 0);
                self.note(at, a, first_name);
                self.note(at, b, second_name);
                Ok(Exp::Pending(at))
            }
        }
    }

    fn simple(&mut self) -> Result<Exp> {
        let exp = match self.token {
            Token::Number(number) => Exp::Number(number),
            Token::String(string) => Exp::String(string),
            Token::Word("nil") => Exp::Nil,
            Token::Word("true") => Exp::Boolean(true),
            Token::Word("false") => Exp::Boolean(false),
            Token::Word("...") => {
                if !self.function().proto.has_rest {
                    return Err(self.error("cannot use '...' outside a vararg function"));
                }
                self.advance()?;
                return Ok(Exp::Rest(self.emit(Code::Rest, (0, 1, 0), 0)));
            }
            Token::Word("{") => return self.constructor(),
            Token::Word("function") => {
                let line = self.token_line;
                self.advance()?;
                return self.body(false, line);
            }
            Token::Word(_) | Token::Name(_) | Token::End => return self.suffixed(),
        };
        self.advance()?;
        Ok(exp)
    }

    /// Compiles a name or parentheses, and what is applied to it.
    fn suffixed(&mut self) -> Result<Exp> {
        let mut exp = match self.token {
            Token::Name(name) => {
                self.advance()?;
                self.variable(name)?
            }
            Token::Word("(") => {
                let line = self.token_line;
                self.advance()?;
                let inner = self.expression()?;
                self.close(")", "(", line)?;
                // One value, which cannot be assigned to.
                let inner = self.read(inner);
                if let Exp::Register(_) | Exp::Pending(_) = inner {
                    let local = self.in_register(inner)?;
                    Exp::Register(local)
                } else {
                    inner
                }
            }
            _ => return Err(self.error("unexpected symbol")),
        };
        loop {
            match self.token {
                Token::Word(".") => {
                    self.advance()?;
                    exp = self.field(exp)?;
                }
                Token::Word("[") => {
                    let name = self.name_of(exp);
                    let table = self.in_register(exp)?;
                    let key = self.bracketed()?;
                    let key = match key {
                        Exp::String(string) => Key::Constant(self.constant(Value::String(string))),
                        Exp::Number(number) if !number.is_nan() => {
                            Key::Constant(self.constant(Value::Number(number)))
                        }
                        other => Key::Register(self.in_register(other)?),
                    };
                    exp = Exp::Element { table, key, name };
                }
                Token::Word(":") => {
                    let line = self.token_line;
                    self.advance()?;
                    let method = self.name()?;
                    let name = self.name_of(exp);
                    let object = self.in_register(exp)?;
                    self.release(object);
                    let function = self.reserve(2)?;
                    let key = self.constant(Value::String(method));
                    let at = self.emit(Code::Method, (function, object, 0), key);
                    self.note(at, object, name);
                    exp = self.call(function, line, Some(("method", method)))?;
                }
                Token::Word("(" | "{") | Token::String(_) => {
                    if self.is("(") && self.token_line != self.line {
                        return Err(self.error("ambiguous syntax (function call x new statement)"));
                    }
                    let line = self.token_line;
                    let name = self.name_of(exp);
                    let function = self.push(exp)?;
                    exp = self.call(function, line, name)?;
                }
                Token::Word(_) | Token::Name(_) | Token::Number(_) | Token::End => {
                    return Ok(exp);
                }
            }
        }
    }

    /// The element that a name after a point means.
    fn field(&mut self, exp: Exp) -> Result<Exp> {
        let name = self.name_of(exp);
        let table = self.in_register(exp)?;
        let field = self.name()?;
        let key = Key::Constant(self.constant(Value::String(field)));
        Ok(Exp::Element { table, key, name })
    }

    fn bracketed(&mut self) -> Result<Exp> {
        self.advance()?;
        let key = self.expression()?;
        let key = match key {
            Exp::Call(_) | Exp::Rest(_) => Exp::Register(self.in_register(key)?),
            other => self.read(other),
        };
        self.expect("]")?;
        Ok(key)
    }

    /// Compiles the arguments of a call of the function in this register, the last one in use
    /// (with an object after it for a method).
    fn call(&mut self, function: u8, line: u32, name: Option<Name>) -> Result<Exp> {
        let first = usize::from(function) + 1;
        let mut is_open = false;
        match self.token {
            Token::String(string) => {
                self.advance()?;
                self.push(Exp::String(string))?;
            }
            Token::Word("{") => {
                let table = self.constructor()?;
                self.push(table)?;
            }
            Token::Word("(") => {
                self.advance()?;
                if !self.is(")") {
                    let (_, last) = self.expressions()?;
                    if matches!(last, Exp::Call(_) | Exp::Rest(_)) {
                        self.open(last)?;
                        is_open = true;
                    } else {
                        self.push(last)?;
                    }
                }
                self.close(")", "(", line)?;
            }
            _ => return Err(self.error("function arguments expected")),
        }
        let count = small(self.function().free - first.min(self.function().free));
        let count = if is_open { OPEN } else { count };
        let at = self.emit_at(line, Code::Call, (function, count, 1), 0);
        self.note(at, function, name);
        self.function().free = first;
        Ok(Exp::Call(at))
    }

    fn constructor(&mut self) -> Result<Exp> {
        let line = self.token_line;
        self.enter()?;
        let table = self.reserve(1)?;
        self.emit(Code::NewTable, (table, 0, 0), 0);
        self.expect("{")?;
        let (mut stored, mut pending) = (0, 0);
        let mut last: Option<Exp> = None;
        while !self.is("}") {
            if let Some(exp) = last.take() {
                self.push(exp)?;
                pending += 1;
                if pending == LIST_BATCH {
                    self.emit(Code::SetList, (table, small(pending), 0), wide(stored + 1));
                    stored += pending;
                    pending = 0;
                    self.function().free = usize::from(table) + 1;
                }
            }
            let is_named = match self.token {
                Token::Name(_) => self.look_ahead()? == Token::Word("="),
                Token::Word(_) | Token::String(_) | Token::Number(_) | Token::End => false,
            };
            if is_named || self.is("[") {
                let before = self.function().free;
                let key = if is_named { Exp::String(self.name()?) } else { self.bracketed()? };
                let key = match key {
                    Exp::String(string) => Key::Constant(self.constant(Value::String(string))),
                    other => Key::Register(self.in_register(other)?),
                };
                self.expect("=")?;
                let value = self.expression()?;
                let from = self.in_register(value)?;
                match key {
                    Key::Register(key) => self.emit(Code::SetIndex, (from, table, key), 0),
                    Key::Constant(key) => self.emit(Code::SetField, (from, table, 0), key),
                };
                self.function().free = before;
            } else {
                last = Some(self.expression()?);
            }
            if !self.takes(",")? && !self.takes(";")? {
                break;
            }
        }
        self.close("}", "{", line)?;
        match last {
            Some(exp @ (Exp::Call(_) | Exp::Rest(_))) => {
                self.open(exp)?;
                self.emit(Code::SetList, (table, OPEN, 0), wide(stored + 1));
            }
            Some(exp) => {
                self.push(exp)?;
                self.emit(Code::SetList, (table, small(pending + 1), 0), wide(stored + 1));
            }
            None if pending > 0 => {
                self.emit(Code::SetList, (table, small(pending), 0), wide(stored + 1));
            }
            None => {}
        }
        self.function().free = usize::from(table) + 1;
        self.levels -= 1;
        Ok(Exp::Register(table))
    }

    /// Compiles the parameters and the body of a function.
    fn body(&mut self, is_method: bool, line: u32) -> Result<Exp> {
        self.functions.push(Function::default());
        self.enter_block(false);
        self.expect("(")?;
        let mut names = Vec::new();
        if is_method {
            names.push(self.hidden("self")?);
        }
        while !self.is(")") {
            if self.takes("...")? {
                self.function().proto.has_rest = true;
                break;
            }
            names.push(self.name()?);
            if !self.takes(",")? {
                break;
            }
            if self.is(")") {
                return Err(self.expected("<name>"));
            }
        }
        self.declare(&names)?;
        self.reserve(names.len())?;
        self.function().proto.params = small(names.len());
        self.expect(")")?;
        self.chunk()?;
        self.close("end", "function", line)?;
        self.leave_block()?;
        let proto = self.finish()?;
        let protos = &mut self.function().proto.protos;
        protos.push(proto);
        let number = wide(protos.len() - 1);
        Ok(Exp::Pending(self.emit(Code::Closure, (0, 0, 0), number)))
    }
}

/// Why a script cannot go on that has loaded such a text.
pub(crate) fn refusal(heap: &mut Heap, refusal: Refusal) -> Stop {
    match refusal {
        Refusal::Exhausted => Stop::Exhausted,
        Refusal::Syntax(text) => match heap.text(text.as_bytes()) {
            Ok(text) => Stop::Error(text),
            Err(stop) => stop,
        },
    }
}
