//! Functions of the bit library, on 32 bits.

use super::{Functions, number, one};
use crate::heap::Stop;
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[
    ("arshift", |vm, args| shift(vm, args, |bits, by| signed(bits).wrapping_shr(by) as u32)),
    ("band", |vm, args| fold(vm, args, |a, b| a & b)),
    ("bnot", |vm, args| map(vm, args, |bits| !bits)),
    ("bor", |vm, args| fold(vm, args, |a, b| a | b)),
    ("bswap", |vm, args| map(vm, args, u32::swap_bytes)),
    ("bxor", |vm, args| fold(vm, args, |a, b| a ^ b)),
    ("lshift", |vm, args| shift(vm, args, u32::wrapping_shl)),
    ("rol", |vm, args| shift(vm, args, u32::rotate_left)),
    ("ror", |vm, args| shift(vm, args, u32::rotate_right)),
    ("rshift", |vm, args| shift(vm, args, u32::wrapping_shr)),
    ("tobit", |vm, args| map(vm, args, |bits| bits)),
    ("tohex", tohex),
];

fn signed(bits: u32) -> i32 {
    i32::from_le_bytes(bits.to_le_bytes())
}

/// The lowest 32 bits of a number, rounded to the next whole one.
fn bits(vm: &mut Vm<'_>, args: Args, at: usize) -> Result<u32, Stop> {
    let rounded = (vm.number_arg(args, at)? + 6_755_399_441_055_744.0).to_bits();
    Ok(u32::try_from(rounded & 0xffff_ffff).unwrap_or(0))
}

fn map(vm: &mut Vm<'_>, args: Args, of: fn(u32) -> u32) -> Result<Results, Stop> {
    number(f64::from(signed(of(bits(vm, args, 0)?))))
}

fn fold(vm: &mut Vm<'_>, args: Args, of: fn(u32, u32) -> u32) -> Result<Results, Stop> {
    let mut found = bits(vm, args, 0)?;
    for at in 1..args.count {
        vm.heap.charge(4)?;
        found = of(found, bits(vm, args, at)?);
    }
    number(f64::from(signed(found)))
}

fn shift(vm: &mut Vm<'_>, args: Args, of: fn(u32, u32) -> u32) -> Result<Results, Stop> {
    let (what, by) = (bits(vm, args, 0)?, bits(vm, args, 1)?);
    number(f64::from(signed(of(what, by & 31))))
}

fn tohex(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let what = bits(vm, args, 0)?;
    let digits = if vm.arg(args, 1).is_nil() { 8 } else { signed(bits(vm, args, 1)?) };
    let many = usize::try_from(digits.unsigned_abs()).unwrap_or(8).min(8);
    let text = if digits < 0 { format!("{what:08X}") } else { format!("{what:08x}") };
    let text = text.get(8 - many..).unwrap_or_default();
    one(vm.heap.text(text.as_bytes())?)
}
