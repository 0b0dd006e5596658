import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;

/** JDBC reads the rows of a query piece by piece, through a portal. */
public class Portals {
    static void expect(boolean holds, String what) {
        if (!holds) throw new IllegalStateException(what);
    }

    public static void main(String[] args) throws Exception {
        try (Connection connection = DriverManager.getConnection(args[0], args[1], args[2])) {
            connection.setAutoCommit(false);
            String text = "SELECT id FROM accounts ORDER BY id";
            for (int size : new int[] {1, 7, 20, 40, 100}) {
                try (PreparedStatement query = connection.prepareStatement(text);
                        Statement change = connection.createStatement()) {
                    query.setFetchSize(size);
                    int count = 0;
                    try (ResultSet rows = query.executeQuery()) {
                        while (rows.next()) {
                            count++;
                            // Other statements of the transaction come in between.
                            if (count % 10 == 0) {
                                change.executeUpdate("UPDATE accounts SET balance = balance + 1 WHERE id = 101");
                            }
                        }
                    }
                    expect(count == 40, count + " rows with the fetch size " + size);
                }
                connection.rollback();
            }
            // A portal ends with its transaction.
            try (PreparedStatement query = connection.prepareStatement(text)) {
                query.setFetchSize(7);
                ResultSet rows = query.executeQuery();
                for (int count = 0; count < 7; count++) expect(rows.next(), "too few rows");
                connection.commit();
                try {
                    while (rows.next()) {}
                    expect(false, "a portal outlived its transaction");
                } catch (SQLException error) {
                    expect(error.getSQLState().equals("34000"), error.toString());
                }
                connection.rollback();
            }
            System.out.println("ok");
        }
    }
}
