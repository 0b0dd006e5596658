//! The code of a function, for a machine with registers.

#![allow(clippy::disallowed_types, reason = "`core`, which has other maps, depends on this crate")]

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::value::{StringId, Value};

/// What an instruction does with its operands: registers `a`, `b` and `c`, and a number `x`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Code {
    /// a = b
    Move,
    /// a = constant x
    Constant,
    /// a … a + b - 1 = nil
    Nil,
    /// a = (b is not 0)
    Boolean,
    /// a = captured variable b
    GetCell,
    /// captured variable b = a
    SetCell,
    /// a = global variable with the name in constant x
    GetGlobal,
    /// global variable with the name in constant x = a
    SetGlobal,
    /// a = b[c]
    GetIndex,
    /// a = b[constant x]
    GetField,
    /// b[c] = a
    SetIndex,
    /// b[constant x] = a
    SetField,
    /// a = {}
    NewTable,
    /// a + 1 = b; a = b[constant x]
    Method,
    /// a = b + c, and so on
    Add,
    Sub,
    Mul,
    Div,
    Mod,
    Pow,
    /// a = b + constant x, and so on
    AddConstant,
    SubConstant,
    MulConstant,
    DivConstant,
    ModConstant,
    PowConstant,
    /// a = -b
    Negate,
    /// a = not b
    Not,
    /// a = #b
    Length,
    /// a = b .. … .. c
    Concat,
    /// Goes to x.
    Jump,
    /// Goes to x if a is true.
    JumpIf,
    /// Goes to x if a is false or nil.
    JumpIfNot,
    /// a = (b == c)
    Equal,
    /// a = (b ~= c)
    NotEqual,
    /// a = (b < c)
    Less,
    /// a = (b <= c)
    LessEqual,
    /// Calls a with the b registers after it, or all up to the top if b is [`OPEN`]. Leaves c
    /// results in a and after it, or all if c is [`OPEN`].
    Call,
    /// Returns what `Call` would leave.
    TailCall,
    /// Returns b values from a, or all up to the top if b is [`OPEN`].
    Return,
    /// Begins a loop over numbers with a, a + 1 and a + 2; goes to x.
    ForPrepare,
    /// Goes to x with the next number in a + 3, unless there is none.
    ForLoop,
    /// Calls a with a + 1 and a + 2; leaves c results in a + 3 and after it.
    ForCall,
    /// Goes to x if a + 3 is not nil, which becomes a + 2.
    ForNext,
    /// Sets b elements of a, from x, to the registers after a; all up to the top if b is [`OPEN`].
    SetList,
    /// a = function x of the functions inside
    Closure,
    /// Functions keep the variables from a on, which end here.
    Close,
    /// a and after it = b of the arguments beyond the parameters, or all if b is [`OPEN`]
    Rest,
}

/// As a number of values: as many as there are.
pub(crate) const OPEN: u8 = 255;

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) code: Code,
    pub(crate) a: u8,
    pub(crate) b: u8,
    pub(crate) c: u8,
    pub(crate) x: u32,
}

/// Where a function finds a captured variable when it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Capture {
    /// In this register of the function around it.
    Register(u8),
    /// Among the captured variables of the function around it.
    Cell(u8),
}

/// What the source calls a value, for errors: a kind and a name.
pub(crate) type Name = (&'static str, StringId);

/// The code of a function.
#[derive(Debug, Default)]
pub(crate) struct Proto {
    pub(crate) code: Vec<Op>,
    /// The line of each instruction.
    pub(crate) lines: Vec<u32>,
    pub(crate) constants: Vec<Value>,
    pub(crate) protos: Vec<Rc<Proto>>,
    pub(crate) captures: Vec<Capture>,
    /// What the source calls the value in a register that an instruction uses.
    pub(crate) names: BTreeMap<(u32, u8), Name>,
    pub(crate) params: u8,
    pub(crate) has_rest: bool,
    /// The number of registers that it uses.
    pub(crate) registers: usize,
}
