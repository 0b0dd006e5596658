//! Statements that belong to a client's session alone: PREPARE and EXECUTE, and cursors.

use sqlparser::ast::{
    CastKind, Expr, SelectItem, SetExpr, Statement, UnaryOperator, Value as SqlValue,
};
use sqlparser::tokenizer::Token;

use super::Refusal;
use super::catalog::Dialect;
use super::parse::{Parsed, Verb, parse};
use super::set::{Reader, near};
use super::value::Value;

/// What is done with a cursor: FETCH, or MOVE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Motion {
    /// So many rows forward, or backward if it is below 0. 0 is the row where the cursor is.
    By(i64),
    /// All rows that follow.
    AllForward,
    /// All rows before.
    AllBackward,
    /// The row of this number; counted from the end if it is below 0.
    Absolute(i64),
    /// The row that is so far from where the cursor is.
    Relative(i64),
}

/// The one statement in a text.
fn one(text: &str, dialect: Dialect) -> Result<Parsed, Refusal> {
    let mut all = parse(text, dialect)?;
    match (all.pop(), all.is_empty()) {
        (Some(parsed), true) => Ok(parsed),
        _ => Err(Refusal::syntax("syntax error: one statement is expected here")),
    }
}

/// What follows the first occurrence of a word, which stands between blanks or parentheses.
fn after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    let is_end = |c: char| c.is_whitespace() || c == '(' || c == ')';
    let mut from = 0;
    loop {
        let rest = text.get(from..)?;
        let start = from + rest.find(|c: char| !is_end(c))?;
        let tail = text.get(start..)?;
        let length = tail.find(is_end).unwrap_or(tail.len());
        if tail.get(..length)?.eq_ignore_ascii_case(word) {
            return text.get(start + length..);
        }
        from = start + length;
    }
}

fn name(reader: &mut Reader) -> Result<String, Refusal> {
    match reader.next() {
        Some(Token::Word(word)) if word.quote_style.is_some() => Ok(word.value),
        Some(Token::Word(word)) => Ok(word.value.to_lowercase()),
        other => Err(near(other.as_ref())),
    }
}

/// `PREPARE name (types) AS statement`, or `PREPARE name FROM 'statement'`.
pub(super) fn prepare(text: &str, dialect: Dialect) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    reader.word("prepare");
    let name = name(&mut reader)?;
    let body = match dialect {
        Dialect::PostgreSql => after(text, "as").map(str::to_owned),
        Dialect::MariaDb if reader.word("from") => match reader.next() {
            Some(Token::SingleQuotedString(body) | Token::DoubleQuotedString(body)) => Some(body),
            _ => {
                return Err(Refusal::unsupported(
                    "PREPARE takes a text constant here: the proxy has no user variables",
                ));
            }
        },
        Dialect::MariaDb => None,
    };
    let body = body.ok_or_else(|| near(reader.next().as_ref()))?;
    let parsed = one(&body, dialect)?;
    match parsed.verb {
        Verb::Data(_) | Verb::Other => Ok(Verb::Prepare(name, Box::new(parsed))),
        _ => Err(Refusal::unsupported(
            "PREPARE takes SELECT, INSERT, UPDATE or DELETE; send other statements as they are",
        )),
    }
}

/// `EXECUTE name (values)`.
pub(super) fn execute(text: &str, dialect: Dialect) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    reader.word("execute");
    let name = name(&mut reader)?;
    match reader.peek() {
        None => return Ok(Verb::Execute(name, Vec::new())),
        Some(Token::LParen) if dialect == Dialect::PostgreSql => {}
        Some(_) if dialect == Dialect::MariaDb => {
            return Err(Refusal::unsupported(
                "EXECUTE … USING takes user variables, which the proxy does not have; use the driver's prepared statements",
            ));
        }
        other => return Err(near(other)),
    }
    let (_, values) = text.split_once('(').unwrap_or_default();
    let values = values.trim_end().strip_suffix(')').ok_or_else(|| near(None))?;
    let parsed = one(&format!("SELECT {values}"), dialect)?;
    let not_constant =
        || Refusal::unsupported("EXECUTE takes constants here; give the values as constants");
    let Verb::Data(statement) = parsed.verb else { return Err(not_constant()) };
    let Statement::Query(query) = *statement else { return Err(not_constant()) };
    let SetExpr::Select(select) = *query.body else { return Err(not_constant()) };
    let value = |item: &SelectItem| match item {
        SelectItem::UnnamedExpr(expr) => constant(expr),
        _ => None,
    };
    let values: Option<Vec<Value>> = select.projection.iter().map(value).collect();
    Ok(Verb::Execute(name, values.ok_or_else(not_constant)?))
}

fn constant(expr: &Expr) -> Option<Value> {
    match expr {
        Expr::Nested(inner) => constant(inner),
        Expr::Cast { kind: CastKind::Cast | CastKind::DoubleColon, expr, .. } => constant(expr),
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => match constant(expr)? {
            Value::Number(text) => Some(Value::Number(format!("-{text}"))),
            _ => None,
        },
        Expr::TypedString(typed) => match &typed.value.value {
            SqlValue::SingleQuotedString(text) => Some(Value::Text(text.clone())),
            _ => None,
        },
        Expr::Value(value) => match &value.value {
            SqlValue::Null => Some(Value::Null),
            SqlValue::Boolean(is) => Some(Value::Bool(*is)),
            SqlValue::Number(text, _) => Some(Value::Number(text.clone())),
            SqlValue::SingleQuotedString(text) | SqlValue::EscapedStringLiteral(text) => {
                Some(Value::Text(text.clone()))
            }
            _ => None,
        },
        _ => None,
    }
}

/// `DECLARE name CURSOR … FOR query`.
pub(super) fn declare(text: &str, dialect: Dialect) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    reader.word("declare");
    let name = name(&mut reader)?;
    let mut is_held = false;
    loop {
        if reader.word("binary") {
            return Err(Refusal::unsupported(
                "a cursor of binary values is not supported; leave BINARY out",
            ));
        } else if reader.word("with") {
            is_held = reader.word("hold");
        } else if reader.word("for") {
            break;
        } else if !["asensitive", "insensitive", "no", "scroll", "cursor", "without", "hold"]
            .into_iter()
            .any(|word| reader.word(word))
        {
            return Err(near(reader.peek()));
        }
    }
    let query = after(text, "for").ok_or_else(|| near(None))?;
    let query = one(query, dialect)?;
    if query.word() != "SELECT" || !matches!(query.verb, Verb::Data(_) | Verb::Other) {
        return Err(Refusal::syntax("a cursor is for a query"));
    }
    Ok(Verb::Declare { name, query: Box::new(query), is_held })
}

/// `FETCH … FROM name`, and `MOVE`.
pub(super) fn fetch(text: &str, dialect: Dialect) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    let is_move = reader.word("move");
    let _ = is_move || reader.word("fetch");
    let motion = if reader.word("next") {
        Motion::By(1)
    } else if reader.word("prior") {
        Motion::By(-1)
    } else if reader.word("first") {
        Motion::Absolute(1)
    } else if reader.word("last") {
        Motion::Absolute(-1)
    } else if reader.word("absolute") {
        Motion::Absolute(count(&mut reader)?.unwrap_or(1))
    } else if reader.word("relative") {
        Motion::Relative(count(&mut reader)?.unwrap_or(1))
    } else if reader.word("forward") {
        if reader.word("all") {
            Motion::AllForward
        } else {
            Motion::By(count(&mut reader)?.unwrap_or(1))
        }
    } else if reader.word("backward") {
        if reader.word("all") {
            Motion::AllBackward
        } else {
            Motion::By(-count(&mut reader)?.unwrap_or(1))
        }
    } else if reader.word("all") {
        Motion::AllForward
    } else {
        Motion::By(count(&mut reader)?.unwrap_or(1))
    };
    let _ = reader.word("from") || reader.word("in");
    let name = name(&mut reader)?;
    match reader.next() {
        None => Ok(Verb::Fetch { name, motion, is_move }),
        other => Err(near(other.as_ref())),
    }
}

fn count(reader: &mut Reader) -> Result<Option<i64>, Refusal> {
    let sign = if reader.takes(&Token::Minus) { -1 } else { 1 };
    match reader.peek().cloned() {
        Some(Token::Number(text, _)) => {
            reader.next();
            let number: i64 =
                text.parse().map_err(|_| near(Some(&Token::make_word(&text, None))))?;
            Ok(Some(sign * number))
        }
        _ => Ok(None),
    }
}

/// `CLOSE name`.
pub(super) fn close(text: &str, dialect: Dialect) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    reader.word("close");
    Ok(Verb::Close(Some(name(&mut reader)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb(text: &str) -> Verb {
        one(text, Dialect::PostgreSql).unwrap().verb
    }

    #[test]
    fn cursors_are_declared_moved_and_closed() {
        let declared = verb("DECLARE \"C 1\" NO SCROLL CURSOR WITH HOLD FOR SELECT 1 FROM t");
        let Verb::Declare { name, query, is_held } = declared else { panic!("{declared:?}") };
        assert_eq!((name.as_str(), query.text.as_str(), is_held), ("C 1", "SELECT 1 FROM t", true));
        for (text, motion) in [
            ("FETCH c", Motion::By(1)),
            ("FETCH FORWARD 2000 FROM \"c\"", Motion::By(2000)),
            ("FETCH ALL FROM c", Motion::AllForward),
            ("FETCH BACKWARD 2 IN c", Motion::By(-2)),
            ("FETCH ABSOLUTE -1 FROM c", Motion::Absolute(-1)),
            ("FETCH FIRST FROM c", Motion::Absolute(1)),
            ("FETCH 0 FROM c", Motion::By(0)),
        ] {
            assert_eq!(
                verb(text),
                Verb::Fetch { name: "c".into(), motion, is_move: false },
                "{text}"
            );
        }
        assert_eq!(verb("CLOSE c"), Verb::Close(Some("c".into())));
    }

    #[test]
    fn prepared_statements_take_constants() {
        let Verb::Prepare(name, parsed) = verb("PREPARE p (int, text) AS SELECT $1, $2") else {
            panic!("not prepared");
        };
        assert_eq!((name.as_str(), parsed.parameters), ("p", 2));
        let values = vec![Value::Number("-5".into()), Value::Text("a)".into()), Value::Null];
        assert_eq!(verb("EXECUTE p (-5, 'a)'::text, NULL)"), Verb::Execute("p".into(), values));
        assert_eq!(verb("EXECUTE p"), Verb::Execute("p".into(), Vec::new()));
        assert!(parse("EXECUTE p (now())", Dialect::PostgreSql).is_err());
        assert!(parse("LISTEN jobs", Dialect::PostgreSql).is_err());
    }
}
