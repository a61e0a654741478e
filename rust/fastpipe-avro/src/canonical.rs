//! The parsing canonical form of a schema, and its Rabin fingerprint (Avro 1.12 specification, "Transforming into
//! Parsing Canonical Form" and "Schema Fingerprints").

use std::collections::HashSet;
use std::fmt::Write;

use crate::schema::{NodeId, Schema, Type};

/// The fingerprint of an empty input, which is also the polynomial.
const EMPTY: u64 = 0xc15d_213a_a4d7_a795;

/// The fingerprint of each byte.
const TABLE: [u64; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut fingerprint = i as u64;
        let mut bit = 0;
        while bit < 8 {
            fingerprint = (fingerprint >> 1) ^ (EMPTY & (fingerprint & 1).wrapping_neg());
            bit += 1;
        }
        table[i] = fingerprint;
        i += 1;
    }
    table
};

/// Returns the CRC-64-AVRO of bytes.
pub fn rabin(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(EMPTY, |sum, &byte| (sum >> 8) ^ TABLE[usize::from(sum as u8 ^ byte)])
}

/// Returns the canonical form of a schema: without attributes that reading doesn't need, and with full names.
pub fn canonical_form(schema: &Schema) -> String {
    let mut form = Form {
        schema,
        out: String::new(),
        written: HashSet::new(),
    };
    form.write(schema.root());
    form.out
}

struct Form<'s> {
    schema: &'s Schema,
    out: String,
    /// Full names of the types written so far. Each type is written once.
    written: HashSet<&'s str>,
}

impl<'s> Form<'s> {
    /// Writes a type. The recursion is bounded, because schemas are nested at most `MAX_SCHEMA_LEVELS` deep.
    fn write(&mut self, id: NodeId) {
        let schema = self.schema;
        let node = schema.node(id);
        if let Some(name) = &node.name {
            if !self.written.insert(name) {
                return self.text(name);
            }
            self.out.push_str("{\"name\":");
            self.text(name);
            self.out.push_str(",\"type\":");
        }
        match &node.ty {
            Type::Null => self.text("null"),
            Type::Boolean => self.text("boolean"),
            Type::Int => self.text("int"),
            Type::Long => self.text("long"),
            Type::Float => self.text("float"),
            Type::Double => self.text("double"),
            Type::Bytes => self.text("bytes"),
            Type::String => self.text("string"),
            Type::Fixed(size) => {
                let _ = write!(self.out, "\"fixed\",\"size\":{size}}}");
            }
            Type::Enum(symbols) => {
                self.out.push_str("\"enum\",\"symbols\":[");
                self.list(symbols.texts.iter(), |form, symbol| form.text(symbol));
                self.out.push_str("]}");
            }
            Type::Array(items) => {
                self.out.push_str("{\"type\":\"array\",\"items\":");
                self.write(*items);
                self.out.push('}');
            }
            Type::Map(values) => {
                self.out.push_str("{\"type\":\"map\",\"values\":");
                self.write(*values);
                self.out.push('}');
            }
            Type::Record(fields) => {
                self.out.push_str("\"record\",\"fields\":[");
                self.list(fields.iter(), |form, field| {
                    form.out.push_str("{\"name\":");
                    form.text(&field.name);
                    form.out.push_str(",\"type\":");
                    form.write(field.node);
                    form.out.push('}');
                });
                self.out.push_str("]}");
            }
            Type::Union(union) => {
                self.out.push('[');
                self.list(union.branches.iter(), |form, branch| form.write(branch.node));
                self.out.push(']');
            }
            // These types occur only in resolved schemas, never in a parsed one.
            Type::Default { node, .. } | Type::Missing { node, .. } | Type::Mismatch { node, .. } => self.write(*node),
        }
    }

    fn list<T>(&mut self, items: impl Iterator<Item = T>, write: impl Fn(&mut Self, T)) {
        for (i, item) in items.enumerate() {
            if i > 0 {
                self.out.push(',');
            }
            write(self, item);
        }
    }

    /// Writes a string. Only quotes and backslashes are escaped.
    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            if matches!(c, '"' | '\\') {
                self.out.push('\\');
            }
            self.out.push(c);
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(json: &str) -> String {
        canonical_form(&Schema::parse(json).unwrap())
    }

    /// The fingerprints in the specification's own tests (share/test/data/schema-tests.txt).
    #[test]
    fn fingerprints_match_known_values() {
        for (schema, fingerprint) in [
            ("\"null\"", 7195948357588979594i64),
            ("\"boolean\"", -6970731678124411036),
            ("\"int\"", 8247732601305521295),
            ("\"long\"", -3434872931120570953),
            ("\"float\"", 5583340709985441680),
            ("\"double\"", -8181574048448539266),
            ("\"bytes\"", 5746618253357095269),
            ("\"string\"", -8142146995180207161),
            ("[]", -1241056759729112623),
            ("[ \"int\"  ]", -5232228896498058493),
            ("[ \"int\" , {\"type\":\"boolean\"} ]", 5392556393470105090),
        ] {
            // An empty union has a canonical form, but the parser rejects it.
            let form = if schema == "[]" {
                schema.to_owned()
            } else {
                form(schema)
            };
            assert_eq!(rabin(form.as_bytes()) as i64, fingerprint, "{form}");
        }
    }

    #[test]
    fn attributes_that_reading_ignores_are_removed() {
        let adorned = r#"{"namespace": "x.y", "doc": "d", "type": "record", "name": "R", "aliases": ["S"], "fields": [
            {"doc": "a", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "A"}, "name": "e"},
            {"name": "f", "type": ["null", {"size": 4, "type": "fixed", "name": "z.F"}], "default": null},
            {"name": "again", "type": {"type": "map", "values": "z.F"}},
            {"name": "when", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "more", "type": {"type": "array", "items": "R"}}, {"name": "e2", "type": "x.y.E"}]}"#;
        let bare = concat!(
            r#"{"name":"x.y.R","type":"record","fields":["#,
            r#"{"name":"e","type":{"name":"x.y.E","type":"enum","symbols":["A","B"]}},"#,
            r#"{"name":"f","type":["null",{"name":"z.F","type":"fixed","size":4}]},"#,
            r#"{"name":"again","type":{"type":"map","values":"z.F"}},{"name":"when","type":"long"},"#,
            r#"{"name":"more","type":{"type":"array","items":"x.y.R"}},{"name":"e2","type":"x.y.E"}]}"#
        );
        assert_eq!(form(adorned), bare);
        // The canonical form is a fixed point. The `apache_avro` crate yields the same form, except that it keeps the
        // braces around a logical type.
        assert_eq!(form(bare), bare);
        let adorned = adorned.replace(r#"{"type": "long", "logicalType": "timestamp-millis"}"#, r#""long""#);
        let other = apache_avro::Schema::parse_str(&adorned).unwrap();
        assert_eq!(other.canonical_form(), bare);
        let fingerprint = other.fingerprint::<apache_avro::rabin::Rabin>();
        assert_eq!(*fingerprint.bytes, rabin(bare.as_bytes()).to_le_bytes());
    }
}
