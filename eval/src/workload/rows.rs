//! Numbered rows of fixed size, which the key-value benchmarks share.

use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Priority, Reads, Value};

use super::options::bounded;
use super::{Form, Options, Request, WorkloadError};

/// Keys and values of a fixed length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    key_bytes: usize,
    value_bytes: usize,
}

impl Rows {
    /// Keys of `key_bytes` (64) and values of `value_bytes` (64).
    pub(super) fn new(options: &Options) -> Result<Self, WorkloadError> {
        let key_bytes = bounded("key_bytes", options.key_bytes, 64, (16, 1_024))?;
        let value_bytes = bounded("value_bytes", options.value_bytes, 64, (16, 65_536))?;
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(Self { key_bytes: size(key_bytes), value_bytes: size(value_bytes) })
    }

    /// The keys of these numbers, each below 10^15: `k` and the number with leading zeros.
    pub(super) fn keys(self, numbers: &[u64]) -> Vec<Key> {
        numbers.iter().map(|&number| self.key(number)).collect()
    }

    /// It writes the number digit by digit: `format!` pads one character at a time, and a
    /// simulation makes millions of keys.
    fn key(self, number: u64) -> Key {
        let mut bytes = vec![b'0'; self.key_bytes];
        let mut left = number;
        for byte in bytes.iter_mut().rev() {
            *byte = b"0123456789".get((left % 10) as usize).copied().unwrap_or(b'0');
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if let Some(first) = bytes.first_mut() {
            *first = b'k';
        }
        bytes.into()
    }

    /// The value that `parameter` stands for: its sixteen hexadecimal digits, over and over.
    pub(super) fn value(self, parameter: u64) -> Value {
        let digits = format!("{parameter:016x}");
        digits.into_bytes().into_iter().cycle().take(self.value_bytes).collect::<Vec<u8>>().into()
    }

    /// A transaction that reads some rows and sets others to a random value. Without writes it only
    /// reads.
    pub(super) fn request(
        self,
        (name, priority): (&'static str, Priority),
        reads: Vec<Key>,
        writes: Vec<Key>,
        form: Form,
        rng: &mut Rng,
    ) -> Request {
        if writes.is_empty() {
            let kind = Kind::ReadOnly;
            return Request { name, kind, reads, writes, priority, parameter: 0, scan: None };
        }
        let (parameter, is_procedure) = (rng.next_u64(), form.draw_procedure(rng));
        let kind = if is_procedure {
            let value = self.value(parameter);
            let gets = reads.iter().cloned().map(Op::Get);
            let puts = writes.iter().cloned().map(|key| Op::Put(key, value.clone()));
            Kind::Procedure(gets.chain(puts).collect())
        } else {
            Kind::Interactive
        };
        Request { name, kind, reads, writes, priority, parameter, scan: None }
    }

    /// A transaction that deletes the first of these rows and sets the others to a random value. It
    /// reads all of them, or all but the first.
    pub(super) fn request_deleting(
        self,
        (name, priority): (&'static str, Priority),
        keys: Vec<Key>,
        form: Form,
        rng: &mut Rng,
    ) -> Request {
        let reads = keys.get(usize::from(rng.chance(1, 2))..).unwrap_or_default().to_vec();
        let mut request = self.request((name, priority), reads, keys, form, rng);
        if let (Kind::Procedure(ops), Some(key)) = (&mut request.kind, request.writes.first()) {
            ops.retain(|op| !op.writes().contains(key));
            ops.push(Op::Delete(key.clone()));
        }
        request
    }

    /// Deletes the first write key, and sets the others to the value of the request's parameter.
    pub(super) fn decide_deleting(self, request: &Request) -> Decision {
        let value = self.value(request.parameter);
        let value = |place| (place > 0).then(|| value.clone());
        let writes = request.writes.iter().enumerate().map(|(at, key)| (key.clone(), value(at)));
        Decision::Commit(writes.collect())
    }

    /// Sets every write key to the value of the request's parameter.
    pub(super) fn decide(self, request: &Request) -> Decision {
        let value = self.value(request.parameter);
        let writes = request.writes.iter().map(|key| (key.clone(), Some(value.clone())));
        Decision::Commit(writes.collect())
    }

    /// Checks that every row read is missing, or is one value repeated from start to end.
    pub(super) fn audit(self, request: &Request, reads: &Reads) -> Result<(), String> {
        for key in &request.reads {
            let read = reads.get(key).ok_or_else(|| format!("{key} was requested but not read"))?;
            let Some(value) = &read.value else { continue };
            let parameter = value
                .0
                .get(..16)
                .and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
            if parameter.is_none_or(|parameter| self.value(parameter) != *value) {
                return Err(format!("{key} holds {value}, which nobody wrote"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_padded_numbers_and_values_repeat_their_parameter() {
        let options = Options { key_bytes: Some(16), value_bytes: Some(18), ..Options::default() };
        let rows = Rows::new(&options).unwrap();
        let keys = rows.keys(&[0, 7, 1_048_576, 999_999_999_999_999]);
        let names: Vec<String> = keys.iter().map(ToString::to_string).collect();
        let expected =
            ["k000000000000000", "k000000000000007", "k000000001048576", "k999999999999999"];
        assert_eq!(names, expected);
        assert_eq!(rows.value(0xab).to_string(), "00000000000000ab00");
    }
}
