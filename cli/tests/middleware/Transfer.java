import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;

/** Money moves between two sources through JDBC, in whichever protocol the address names. */
public class Transfer {
    static void add(PreparedStatement statement, int account, int amount) throws SQLException {
        statement.setInt(1, amount);
        statement.setInt(2, account);
        int changed = statement.executeUpdate();
        if (changed != 1) throw new IllegalStateException(changed + " rows were changed");
    }

    static int balance(Connection connection, int account) throws SQLException {
        try (PreparedStatement statement =
                connection.prepareStatement("SELECT balance FROM accounts WHERE id = ?")) {
            statement.setInt(1, account);
            try (ResultSet rows = statement.executeQuery()) {
                if (!rows.next()) throw new IllegalStateException("no account " + account);
                return rows.getInt("balance");
            }
        }
    }

    static void expect(boolean holds, String what) {
        if (!holds) throw new IllegalStateException(what);
    }

    public static void main(String[] args) throws Exception {
        try (Connection connection = DriverManager.getConnection(args[0], args[1], args[2])) {
            connection.setTransactionIsolation(Connection.TRANSACTION_SERIALIZABLE);
            connection.setAutoCommit(false);
            int a = balance(connection, 1);
            int b = balance(connection, 101);
            try (PreparedStatement change =
                    connection.prepareStatement("UPDATE accounts SET balance = balance + ? WHERE id = ?")) {
                // Often enough that the driver prepares it at the server.
                for (int times = 0; times < 8; times++) {
                    add(change, 1, -1);
                    add(change, 101, 1);
                    connection.commit();
                }
                expect(balance(connection, 1) == a - 8 && balance(connection, 101) == b + 8, "a transfer was lost");
                add(change, 1, -100);
                add(change, 101, 100);
                connection.rollback();
                expect(balance(connection, 1) == a - 8 && balance(connection, 101) == b + 8, "a rollback did not undo");
                connection.commit();
                // An error at one source undoes the other's part.
                add(change, 1, -100);
                try (Statement statement = connection.createStatement()) {
                    statement.executeUpdate("INSERT INTO accounts (id, balance) VALUES (101, 1)");
                    expect(false, "a duplicate was taken");
                } catch (SQLException error) {
                    expect(error.getSQLState().startsWith("23"), error.toString());
                }
                connection.rollback();
                expect(balance(connection, 1) == a - 8, "half of a failed transaction stayed");
                connection.commit();
                // Who waits for too long, or is in a deadlock, is told to try again, and does.
                try (Connection other = DriverManager.getConnection(args[0], args[1], args[2])) {
                    other.setAutoCommit(false);
                    try (Statement statement = other.createStatement()) {
                        statement.executeUpdate("UPDATE accounts SET balance = balance + 1 WHERE id = 1");
                    }
                    boolean wasRefused = false;
                    try {
                        add(change, 1, -1);
                    } catch (SQLException error) {
                        wasRefused = true;
                        expect(error.getSQLState().startsWith("40") || error.getSQLState().equals("55P03"), error.toString());
                    }
                    expect(wasRefused, "two wrote one row at once");
                    connection.rollback();
                    other.rollback();
                    add(change, 1, -1);
                    add(change, 101, 1);
                    connection.commit();
                }
            }
            expect(balance(connection, 1) == a - 9 && balance(connection, 101) == b + 9, "a retry was lost");
            try (Statement statement = connection.createStatement();
                    ResultSet rows = statement.executeQuery("SELECT count(*), sum(balance) FROM accounts")) {
                rows.next();
                System.out.println("ok " + rows.getInt(1) + " " + rows.getLong(2));
            }
            connection.commit();
        }
    }
}
