//! `#[derive(Wire)]`: the bytes of a message or a record, from its definition.
//! `#[derive(Message)]`: the name, the transaction and the receiver of a message.
//!
//! See `orthodrome_core::wire` for the encoding, and ADR 32 for why it is derived.

mod message;

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::spanned::Spanned as _;
use syn::{Attribute, Data, DeriveInput, Error, Fields, GenericParam, Generics, Ident, LitStr};

/// Implements `orthodrome_core::wire::Wire`.
///
/// - A struct is a list of fields, numbered from 1 in the order in which they stand. A struct with
///   one field that has no name is that field.
/// - An enum is one field, whose number says which variant: from 1, in the order in which they
///   stand. A variant is a list of fields like a struct. If no variant has fields, the enum is a
///   number.
///
/// A new field or variant goes to the end. `#[wire(number = N)]` on a field or a variant gives it
/// another number: those after one that was removed must keep theirs.
///
/// On a type, or on a field that has a name:
/// - `#[wire(check = "path")]`: a function from a reference to `Result<(), WireError>` that checks
///   the decoded value. The error names the field.
/// - `#[wire(sample = "path")]`: a function from `&mut Rng` to a value that passes the check, where
///   few random values would.
///
/// On a field that is a `Vec`:
/// - `#[wire(ascending)]`: its items ascend, each once; other bytes are refused.
///
/// On a type:
/// - `#[wire(bound = "")]`: the bounds of the implementation, instead of `T: Wire` for each type
///   parameter.
#[proc_macro_derive(Wire, attributes(wire))]
pub fn derive_wire(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Implements `orthodrome_core::machine::Message` for an enum of messages. The name of a message is
/// that of its variant, its size is that of its encoding, and its transaction is its field `txn`.
///
/// `#[message(…)]` on a variant changes that. Its expressions use the fields by their names, as
/// references; the fields of a tuple are `f0`, `f1` and so on.
/// - `kind = …`: another name, such as that of a message inside.
/// - `txn = …`: its transaction: a field, a field of a field, or an `Option<TxnId>`.
/// - `keys = …`: the number of keys that the receiver processes; 0 otherwise.
/// - `control`: it uses the lane for control messages.
/// - `to = …`: the partition that it is for. If a variant has this option, the enum has a method
///   `partition`.
/// - `led = …`: the partition for which only its leader sends it. If a variant has this option, the
///   enum has a method `led_by_sender`.
///
/// `#[message(size = path)]` on the type names a function from a reference to the size in bytes, for
/// messages that are never encoded.
#[proc_macro_derive(Message, attributes(message))]
pub fn derive_message(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    message::expand(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Gives an enum of messages the method `kind`, as [`macro@Message`] does, for messages that other
/// messages contain.
#[proc_macro_derive(Kind, attributes(message))]
pub fn derive_kind(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    message::expand_kind(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// The options of `#[wire(…)]` on a type, a variant or a field.
#[derive(Default)]
struct Options {
    check: Option<syn::Path>,
    sample: Option<syn::Path>,
    bound: Option<String>,
    number: Option<u32>,
}

impl Options {
    /// An expression that draws a value which passes the check. `any` draws a value that may not
    /// pass.
    fn sample(&self, any: &TokenStream) -> TokenStream {
        match (&self.sample, &self.check) {
            (Some(sample), _) => quote!(#sample(rng)),
            (None, None) => any.clone(),
            (None, Some(check)) => quote! {
                loop {
                    let drawn = { #any };
                    if #check(&drawn).is_ok() {
                        break drawn;
                    }
                }
            },
        }
    }
}

fn options(attributes: &[Attribute]) -> syn::Result<Options> {
    let mut options = Options::default();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("wire")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("number") {
                options.number = Some(meta.value()?.parse::<syn::LitInt>()?.base10_parse()?);
                return Ok(());
            }
            if meta.path.is_ident("ascending") {
                options.check = Some(syn::parse_quote!(wire::check_ascending));
                options.sample = Some(syn::parse_quote!(wire::sample_ascending));
                return Ok(());
            }
            let text = meta.value()?.parse::<LitStr>()?;
            if meta.path.is_ident("check") {
                options.check = Some(text.parse()?);
            } else if meta.path.is_ident("sample") {
                options.sample = Some(text.parse()?);
            } else if meta.path.is_ident("bound") {
                options.bound = Some(text.value());
            } else {
                return Err(meta.error("expected check, sample, ascending, bound or number"));
            }
            Ok(())
        })?;
    }
    Ok(options)
}

/// Numbers of fields or variants: each is one more than the previous one, unless an attribute sets
/// it.
fn numbers<'a>(items: impl Iterator<Item = &'a [Attribute]>) -> syn::Result<Vec<u32>> {
    let mut all: Vec<u32> = Vec::new();
    for attributes in items {
        let number = options(attributes)?.number.unwrap_or(all.last().map_or(1, |last| last + 1));
        if all.contains(&number) {
            let span = attributes.first().map_or_else(proc_macro2::Span::call_site, |a| a.span());
            return Err(Error::new(span, format!("the number {number} is taken")));
        }
        all.push(number);
    }
    Ok(all)
}

/// A list of fields, of a struct or of a variant.
struct List {
    /// The names of the fields in a pattern.
    bound: Vec<Ident>,
    /// Their names in the schema.
    names: Vec<String>,
    /// Their types.
    types: Vec<syn::Type>,
    /// Their numbers.
    numbers: Vec<u32>,
    /// Their checks and samples.
    options: Vec<Options>,
    /// `{ a, b }`, `(f_0, f1)` or nothing.
    pattern: TokenStream,
}

fn list(fields: &Fields) -> syn::Result<List> {
    let numbers = numbers(fields.iter().map(|field| field.attrs.as_slice()))?;
    let types = fields.iter().map(|field| field.ty.clone()).collect();
    let options = fields.iter().map(|field| options(&field.attrs)).collect::<syn::Result<_>>()?;
    let own: Vec<&Ident> = fields.iter().filter_map(|field| field.ident.as_ref()).collect();
    let names: Vec<String> = match fields {
        Fields::Named(_) => own.iter().map(|name| name.to_string().replace("r#", "")).collect(),
        Fields::Unnamed(_) | Fields::Unit => (0..fields.len()).map(|n| n.to_string()).collect(),
    };
    // Prefixed, so that no field shadows a name that the methods use.
    let bound: Vec<Ident> = names.iter().map(|name| format_ident!("f_{name}")).collect();
    let pattern = match fields {
        Fields::Named(_) => quote!({ #(#own: #bound),* }),
        Fields::Unnamed(_) => quote!((#(#bound),*)),
        Fields::Unit => quote!(),
    };
    Ok(List { bound, names, types, numbers, options, pattern })
}

impl List {
    fn is_transparent(&self, fields: &Fields) -> bool {
        matches!(fields, Fields::Unnamed(_)) && self.bound.len() == 1
    }

    fn size(&self) -> TokenStream {
        let Self { bound, numbers, .. } = self;
        quote!(0 #(+ wire::Wire::field_size(#bound, #numbers))*)
    }

    fn put(&self) -> TokenStream {
        let Self { bound, numbers, .. } = self;
        quote!(#(wire::Wire::put_field(#bound, #numbers, out);)*)
    }

    /// An expression of `Result<Self, WireError>`, from the `Bytes` in `source`.
    fn take(&self, path: &TokenStream, named: &str) -> TokenStream {
        let Self { bound, names, types, numbers, options, pattern } = self;
        let full: Vec<String> = names.iter().map(|name| format!("{named}.{name}")).collect();
        let checks = bound.iter().zip(&full).zip(options).filter_map(|((bound, full), options)| {
            let check = options.check.as_ref()?;
            Some(quote!(#check(&#bound).map_err(|error| error.of(#full))?;))
        });
        quote! {{
            #(let mut #bound: Option<#types> = None;)*
            let mut fields = source;
            while let Some((number, raw)) = fields.next_field()? {
                match number {
                    #(#numbers => wire::Wire::take_field(&mut #bound, raw)?,)*
                    // A field of a later version.
                    _ => {}
                }
            }
            #(let #bound = wire::or_absent(#bound, #full)?;)*
            #(#checks)*
            Ok(#path #pattern)
        }}
    }

    fn sample(&self, path: &TokenStream) -> TokenStream {
        let Self { bound, options, pattern, .. } = self;
        let samples =
            options.iter().map(|options| options.sample(&quote!(wire::Wire::sample(rng))));
        quote! {{
            #(let #bound = #samples;)*
            #path #pattern
        }}
    }

    /// A table with number, name and type of each field.
    fn schema(&self) -> TokenStream {
        let Self { names, types, numbers, .. } = self;
        quote!(&[#(wire::Described(#numbers, #names, <#types as wire::Wire>::schema)),*])
    }
}

/// The methods of the trait, without those that have a default.
struct Body {
    shape: TokenStream,
    size: TokenStream,
    put: TokenStream,
    take: TokenStream,
    sample: TokenStream,
    schema: TokenStream,
}

fn structure(name: &str, fields: &Fields) -> syn::Result<Body> {
    let list = list(fields)?;
    let pattern = &list.pattern;
    if let (true, [inner]) = (list.is_transparent(fields), list.types.as_slice()) {
        return Ok(Body {
            shape: quote!(<#inner as wire::Wire>::SHAPE),
            size: quote!(wire::Wire::size(&self.0)),
            put: quote!(wire::Wire::put(&self.0, out)),
            take: quote!(Ok(Self(wire::Wire::take(raw)?))),
            sample: quote!(Self(wire::Wire::sample(rng))),
            schema: quote!(<#inner as wire::Wire>::schema(schema)),
        });
    }
    let (size, put) = (list.size(), list.put());
    let take = list.take(&quote!(Self), name);
    let members = list.schema();
    Ok(Body {
        shape: quote!(wire::Shape::Bytes),
        size: quote! { let Self #pattern = self; #size },
        put: quote! { let Self #pattern = self; #put },
        take: quote! { let source = raw.message(#name)?; #take },
        sample: list.sample(&quote!(Self)),
        schema: quote!(schema.describe(concat!(module_path!(), "::", #name), #members)),
    })
}

/// An enum whose variants have no fields.
fn numeral(name: &str, variants: &[&syn::Variant]) -> syn::Result<Body> {
    let numbers = numbers(variants.iter().map(|variant| variant.attrs.as_slice()))?;
    let wide = numbers.iter().map(|number| u64::from(*number)).collect::<Vec<_>>();
    let names = variants.iter().map(|variant| &variant.ident).collect::<Vec<_>>();
    let texts = names.iter().map(|name| name.to_string());
    Ok(Body {
        shape: quote!(wire::Shape::Varint),
        size: quote! { match self { #(Self::#names => wire::Wire::size(&#wide),)* } },
        put: quote! { match self { #(Self::#names => wire::Wire::put(&#wide, out),)* } },
        take: quote! {
            match <u64 as wire::Wire>::take(raw)? {
                #(#wide => Ok(Self::#names),)*
                other => Err(wire::WireError::unknown(#name, other)),
            }
        },
        sample: quote! {
            let all = [#(#wide),*];
            match rng.pick(&all).copied().unwrap_or_default() {
                #(#wide => Self::#names,)*
                other => unreachable!("{other} was not drawn"),
            }
        },
        schema: quote! {
            let members = &[#(wire::Described(#numbers, #texts, |_| String::new())),*];
            schema.describe(concat!(module_path!(), "::", #name), members)
        },
    })
}

fn choice(name: &str, variants: &[&syn::Variant]) -> syn::Result<Body> {
    let numbers = numbers(variants.iter().map(|variant| variant.attrs.as_slice()))?;
    let wide = numbers.iter().map(|number| u64::from(*number)).collect::<Vec<_>>();
    let (mut sizes, mut puts, mut takes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut samples, mut members) = (Vec::new(), Vec::new());
    let mut possible = Vec::new();
    for (variant, number) in variants.iter().zip(&numbers) {
        let (ident, list) = (&variant.ident, list(&variant.fields)?);
        let (path, pattern) = (quote!(Self::#ident), &list.pattern);
        let text = ident.to_string();
        let full = format!("{name}::{text}");
        let types = &list.types;
        possible.push(quote!(true #(&& <#types as wire::Wire>::IS_POSSIBLE)*));
        if let (true, [inner]) = (list.is_transparent(&variant.fields), list.types.as_slice()) {
            sizes.push(quote!(#path(f_0) => wire::Wire::present_size(f_0, #number)));
            puts.push(quote!(#path(f_0) => wire::Wire::put_present(f_0, #number, out)));
            takes.push(quote!(#number => Ok(#path(wire::Wire::take(raw)?))));
            samples.push(quote!(#path(wire::Wire::sample(rng))));
            let of = quote!(<#inner as wire::Wire>::schema);
            members.push(quote!(wire::Described(#number, #text, #of)));
            continue;
        }
        let (size, put, take) = (list.size(), list.put(), list.take(&path, &full));
        let inner = list.schema();
        sizes.push(quote!(#path #pattern => wire::nested_size(#number, #size)));
        puts.push(quote! {
            #path #pattern => {
                wire::put_nested(#number, #size, out);
                #put
            }
        });
        takes.push(quote! {
            #number => {
                let source = raw.message(#full)?;
                #take
            }
        });
        samples.push(list.sample(&path));
        let name = quote!(concat!(module_path!(), "::", #full));
        let of = quote!(|schema| schema.describe(#name, #inner));
        members.push(quote!(wire::Described(#number, #text, #of)));
    }
    Ok(Body {
        shape: quote!(wire::Shape::Bytes),
        size: quote!(match self { #(#sizes,)* }),
        put: quote!(match self { #(#puts,)* }),
        take: quote! {
            let mut fields = raw.message(#name)?;
            // The last one counts, as in protobuf; variants of later versions are unknown.
            let mut found = Err(wire::WireError::Missing(#name));
            while let Some((number, raw)) = fields.next_field()? {
                found = match number {
                    #(#takes,)*
                    other => Err(wire::WireError::unknown(#name, u64::from(other))),
                };
            }
            found
        },
        sample: quote! {
            let all: Vec<u64> = [#((#wide, #possible)),*]
                .into_iter()
                .filter_map(|(number, is_possible)| is_possible.then_some(number))
                .collect();
            match rng.pick(&all).copied().unwrap_or_default() {
                #(#wide => #samples,)*
                other => unreachable!("{other} was not drawn"),
            }
        },
        schema: quote! {
            schema.describe(concat!(module_path!(), "::", #name), &[#(#members),*])
        },
    })
}

fn bounds(generics: &Generics, bound: Option<&str>) -> syn::Result<Generics> {
    let mut generics = generics.clone();
    let clause = generics.make_where_clause();
    if let Some(text) = bound {
        if !text.is_empty() {
            let parsed: syn::WhereClause = syn::parse_str(&format!("where {text}"))?;
            clause.predicates.extend(parsed.predicates);
        }
        return Ok(generics);
    }
    let names = generics.params.iter().filter_map(|parameter| match parameter {
        GenericParam::Type(parameter) => Some(parameter.ident.clone()),
        GenericParam::Lifetime(_) | GenericParam::Const(_) => None,
    });
    let names = names.collect::<Vec<_>>();
    let clause = generics.make_where_clause();
    for name in names {
        clause.predicates.push(syn::parse_quote!(#name: ::orthodrome_core::wire::Wire));
    }
    Ok(generics)
}

fn expand(input: &DeriveInput) -> syn::Result<TokenStream> {
    let options = options(&input.attrs)?;
    let name = &input.ident;
    let text = name.to_string();
    let body = match &input.data {
        Data::Struct(data) => structure(&text, &data.fields)?,
        Data::Enum(data) => {
            let variants = data.variants.iter().collect::<Vec<_>>();
            if variants.iter().all(|variant| matches!(variant.fields, Fields::Unit)) {
                numeral(&text, &variants)?
            } else {
                choice(&text, &variants)?
            }
        }
        Data::Union(_) => return Err(Error::new(input.span(), "a union has no fields of its own")),
    };
    let generics = bounds(&input.generics, options.bound.as_deref())?;
    let (impl_generics, type_generics, clause) = generics.split_for_impl();
    let Body { shape, size, put, take, sample, schema } = body;
    let sample = options.sample(&sample);
    let take = match options.check {
        None => take,
        Some(path) => quote! {
            let decoded: Self = (|| { #take })()?;
            #path(&decoded)?;
            Ok(decoded)
        },
    };
    Ok(quote! {
        #[allow(unused_variables, unused_mut, clippy::all, clippy::pedantic)]
        const _: () = {
            use ::orthodrome_core::wire;

            impl #impl_generics wire::Wire for #name #type_generics #clause {
                const SHAPE: wire::Shape = #shape;
                fn size(&self) -> usize { #size }
                fn put(&self, out: &mut ::orthodrome_core::wire::Out) { #put }
                fn take(raw: wire::Raw<'_>) -> Result<Self, wire::WireError> { #take }
                fn sample(rng: &mut ::orthodrome_core::Rng) -> Self { #sample }
                fn schema(schema: &mut wire::Schema) -> String { #schema }
            }
        };
    })
}
