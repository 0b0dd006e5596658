//! Checks of what a statement must not contain: values that differ between executions, renames,
//! rows without a key.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Assignment, AssignmentTarget, Expr, ObjectName, Query, SetExpr, Statement, TableWithJoins,
    Visitor,
};

use super::super::Refusal;
use super::super::catalog::Dialect;
use super::super::parse::Isolation;
use super::super::route::{Names, table_name};
use super::super::walk::walk;
use super::Planner;

impl Planner<'_> {
    /// Refuses a statement that does not name its rows by key, if that is required.
    pub(super) fn check_named(
        &self,
        statement: &Statement,
        names_all: bool,
    ) -> Result<(), Refusal> {
        if !self.context.by_key {
            return Ok(());
        }
        let has_nested = match statement {
            Statement::Query(_) => queries(statement) > 1,
            Statement::Insert(insert) => {
                let is_values = |query: &Query| {
                    query.with.is_none() && matches!(&*query.body, SetExpr::Values(_))
                };
                let own = insert.source.as_deref().filter(|query| is_values(query));
                queries(statement) > usize::from(own.is_some())
            }
            _ => queries(statement) > 0,
        };
        if !names_all || has_nested {
            return Err(Refusal::unsupported(
                "in this mode a statement must name each row by the `primary` columns of the proxy's configuration file, \
                 with whole numbers and without subqueries; rewrite it, or choose another `mode`",
            ));
        }
        if let Statement::Insert(insert) = statement
            && (insert.on.is_some() || insert.replace_into || insert.ignore)
        {
            return Err(Refusal::unsupported(
                "this mode does not support ON CONFLICT, ON DUPLICATE KEY, REPLACE and IGNORE, because they change or \
                 skip rows that already exist; read the row first, or choose another `mode`",
            ));
        }
        if !matches!(statement, Statement::Query(_)) {
            check_deterministic(
                statement,
                "would have another value when the transaction commits",
            )?;
        }
        Ok(())
    }

    pub(super) fn check_assignments(
        &self,
        from: &[TableWithJoins],
        assignments: &[Assignment],
    ) -> Result<(), Refusal> {
        let names = Names::default();
        let scope = self.router.scope(from, None, &names)?;
        for assignment in assignments {
            let targets: Vec<&ObjectName> = match &assignment.target {
                AssignmentTarget::ColumnName(name) => vec![name],
                AssignmentTarget::Tuple(names) => names.iter().collect(),
            };
            for target in targets {
                let column = table_name(target);
                // It is not known to which table an unqualified name belongs, so each one is reason
                // to refuse.
                for scoped in &scope.tables {
                    if scoped.table.sharding().is_some_and(|s| s.column == column) {
                        return Err(Refusal::unsupported(format!(
                            "column \"{column}\" is the sharding column of \"{}\" and cannot be changed; delete the \
                             row and insert it anew",
                            scoped.table.name,
                        )));
                    }
                    let is_named = scoped.table.primary.contains(&column);
                    let locks = self.context.isolation == Isolation::Serializable
                        && scoped
                            .table
                            .sources()
                            .iter()
                            .any(|s| self.kind(*s) == Dialect::PostgreSql);
                    if is_named && (locks || self.context.by_key) {
                        return Err(Refusal::unsupported(format!(
                            "column \"{column}\" is one of those that name a row of \"{}\", and SERIALIZABLE wants to know names \
                             before; delete the row and insert it anew, or ask for REPEATABLE READ",
                            scoped.table.name,
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Number of queries in a statement, at any depth.
pub(super) fn queries(statement: &Statement) -> usize {
    struct Count(usize);
    impl Visitor for Count {
        type Break = ();
        fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
            self.0 += 1;
            ControlFlow::Continue(())
        }
    }
    let mut count = Count(0);
    let _ = walk(statement, &mut count);
    count.0
}

pub(super) const OTHER_COPIES: &str = "would have another value in each copy of a broadcast table";

/// Refuses expressions whose value differs between executions; `why` explains why that is wrong
/// here.
pub(super) fn check_deterministic(statement: &Statement, why: &str) -> Result<(), Refusal> {
    const VARY: [&str; 34] = [
        "random",
        "rand",
        "uuid",
        "gen_random_uuid",
        "uuid_generate_v4",
        "now",
        "current_timestamp",
        "localtimestamp",
        "sysdate",
        "clock_timestamp",
        "statement_timestamp",
        "transaction_timestamp",
        "nextval",
        "current_time",
        "localtime",
        "unix_timestamp",
        "current_date",
        "curdate",
        "curtime",
        "utc_timestamp",
        "utc_date",
        "utc_time",
        "timeofday",
        "uuid_short",
        "sys_guid",
        "random_bytes",
        "gen_random_bytes",
        "last_insert_id",
        "connection_id",
        "pg_backend_pid",
        "txid_current",
        "setval",
        "lastval",
        "currval",
    ];
    /// Finds the first function whose value differs between executions.
    struct Varies(Option<String>);
    impl Visitor for Varies {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            match expr {
                Expr::Function(function) if VARY.contains(&table_name(&function.name).as_str()) => {
                    self.0 = Some(table_name(&function.name));
                    ControlFlow::Break(())
                }
                _ => ControlFlow::Continue(()),
            }
        }
    }
    let mut varies = Varies(None);
    let _ = walk(statement, &mut varies);
    match varies.0 {
        None => Ok(()),
        Some(name) => {
            Err(Refusal::unsupported(format!("{name}() {why}; compute it in the client")))
        }
    }
}
