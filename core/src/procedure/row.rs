//! Rows as text: groups of decimal numbers, separated by spaces; bars separate the groups. The form
//! is short, the same everywhere, and readable in a trace.

use crate::txn::Value;

/// The groups of numbers in a text; none if the text has another form.
#[must_use]
pub fn parse(value: &Value) -> Option<Vec<Vec<i64>>> {
    let text = std::str::from_utf8(&value.0).ok()?;
    let group =
        |group: &str| group.split_ascii_whitespace().map(|word| word.parse().ok()).collect();
    text.split('|').map(group).collect()
}

/// The text of groups of numbers.
#[must_use]
pub fn format<'a>(groups: impl IntoIterator<Item = &'a [i64]>) -> Value {
    let mut text = String::new();
    for (at, group) in groups.into_iter().enumerate() {
        if at > 0 {
            text.push('|');
        }
        for (at, number) in group.iter().enumerate() {
            if at > 0 {
                text.push(' ');
            }
            text.push_str(&number.to_string());
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_they_were() {
        for groups in [vec![vec![]], vec![vec![1, -2], vec![], vec![i64::MIN, i64::MAX]]] {
            let value = format(groups.iter().map(Vec::as_slice));
            assert_eq!(parse(&value), Some(groups));
        }
        assert_eq!(parse(&"1 2|3".into()), Some(vec![vec![1, 2], vec![3]]));
        for wrong in ["x", "1,2", "1||x", "99999999999999999999"] {
            assert_eq!(parse(&wrong.into()), None, "{wrong}");
        }
        assert_eq!(parse(&vec![0xff_u8].into()), None);
    }
}
