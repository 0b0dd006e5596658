//! Functions of the math library. `libm` computes them in software, with one result everywhere.

use super::{Functions, number};
use crate::heap::Stop;
use crate::number as numbers;
use crate::value::Value;
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[
    ("abs", |vm, args| map(vm, args, f64::abs)),
    ("acos", |vm, args| map(vm, args, libm::acos)),
    ("asin", |vm, args| map(vm, args, libm::asin)),
    ("atan", |vm, args| map(vm, args, libm::atan)),
    ("atan2", |vm, args| map_two(vm, args, libm::atan2)),
    ("ceil", |vm, args| map(vm, args, libm::ceil)),
    ("cos", |vm, args| map(vm, args, libm::cos)),
    ("cosh", |vm, args| map(vm, args, libm::cosh)),
    ("deg", |vm, args| map(vm, args, |radians| radians / (std::f64::consts::PI / 180.0))),
    ("exp", |vm, args| map(vm, args, libm::exp)),
    ("floor", |vm, args| map(vm, args, libm::floor)),
    ("fmod", |vm, args| map_two(vm, args, libm::fmod)),
    ("frexp", frexp),
    ("ldexp", ldexp),
    ("log", |vm, args| map(vm, args, libm::log)),
    ("log10", |vm, args| map(vm, args, libm::log10)),
    ("max", |vm, args| fold(vm, args, |a, b| if b > a { b } else { a })),
    ("min", |vm, args| fold(vm, args, |a, b| if b < a { b } else { a })),
    ("mod", |vm, args| map_two(vm, args, libm::fmod)),
    ("modf", modf),
    ("pow", |vm, args| map_two(vm, args, libm::pow)),
    ("rad", |vm, args| map(vm, args, |degrees| degrees * (std::f64::consts::PI / 180.0))),
    ("random", random),
    ("randomseed", randomseed),
    ("sin", |vm, args| map(vm, args, libm::sin)),
    ("sinh", |vm, args| map(vm, args, libm::sinh)),
    ("sqrt", |vm, args| map(vm, args, libm::sqrt)),
    ("tan", |vm, args| map(vm, args, libm::tan)),
    ("tanh", |vm, args| map(vm, args, libm::tanh)),
];

fn map(vm: &mut Vm<'_>, args: Args, of: fn(f64) -> f64) -> Result<Results, Stop> {
    number(of(vm.number_arg(args, 0)?))
}

fn map_two(vm: &mut Vm<'_>, args: Args, of: fn(f64, f64) -> f64) -> Result<Results, Stop> {
    let (a, b) = (vm.number_arg(args, 0)?, vm.number_arg(args, 1)?);
    number(of(a, b))
}

fn fold(vm: &mut Vm<'_>, args: Args, of: fn(f64, f64) -> f64) -> Result<Results, Stop> {
    let mut found = vm.number_arg(args, 0)?;
    for at in 1..args.count {
        vm.heap.charge(4)?;
        found = of(found, vm.number_arg(args, at)?);
    }
    number(found)
}

fn frexp(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (fraction, exponent) = libm::frexp(vm.number_arg(args, 0)?);
    let exponent = Value::Number(f64::from(exponent));
    Ok(Results::Many(vec![Value::Number(fraction), exponent]))
}

fn ldexp(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (fraction, exponent) = (vm.number_arg(args, 0)?, vm.integer_arg(args, 1)?);
    // Beyond this, the result is 0 or infinite anyway.
    let exponent = i32::try_from(exponent.clamp(-10_000, 10_000)).unwrap_or(0);
    number(libm::ldexp(fraction, exponent))
}

fn modf(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (fraction, whole) = libm::modf(vm.number_arg(args, 0)?);
    Ok(Results::Many(vec![Value::Number(whole), Value::Number(fraction)]))
}

/// The state of the random numbers of a script that begins: that of `drand48` with the seed 0, as
/// in Redis.
pub(crate) const RANDOM_SEED: u64 = 0x330e;

/// The next number below 1.
fn draw(vm: &mut Vm<'_>) -> f64 {
    vm.random = (vm.random.wrapping_mul(0x5_deec_e66d).wrapping_add(0xb)) & 0xffff_ffff_ffff;
    let bits = u32::try_from(vm.random >> 17).unwrap_or(0);
    f64::from(bits % 0x7fff_ffff) / f64::from(0x7fff_ffff_u32)
}

fn random(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let drawn = draw(vm);
    let (low, high, last) = match args.count {
        0 => return number(drawn),
        1 => (1.0, numbers::whole(vm.number_arg(args, 0)?), 0),
        2 => {
            let low = numbers::whole(vm.number_arg(args, 0)?);
            (whole(low), numbers::whole(vm.number_arg(args, 1)?), 1)
        }
        _ => return Err(vm.error("wrong number of arguments")),
    };
    let high = whole(high);
    if low > high {
        return Err(vm.bad_arg(args, last, "interval is empty"));
    }
    number(libm::floor(drawn * (high - low + 1.0)) + low)
}

fn whole(number: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "as in C")]
    let number = number as f64;
    number
}

fn randomseed(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let seed = vm.integer_arg(args, 0)?;
    let bits = u64::from_le_bytes(seed.to_le_bytes()) & 0xffff_ffff;
    vm.random = (bits << 16) | RANDOM_SEED;
    Ok(Results::None)
}
