/**
 * A schema as text, read from PostgreSQL's catalogs (pg_dump is not among the embedded binaries). The text is for
 * reading and comparing: one statement per object, in an order that depends on names only.
 */

/** 'c' sorts by bytes, whatever the database's locale. Partitions but the default one are made by date: left out. */
const relations = `
  SELECT c.oid, c.relname AS name, c.relkind AS kind, c.reloptions AS options, c.relpersistence AS persistence,
         pg_get_partkeydef(c.oid) AS partition_key, pg_get_expr(c.relpartbound, c.oid) AS bound,
         parent.relname AS parent, pg_get_viewdef(c.oid) AS view, obj_description(c.oid, 'pg_class') AS comment
    FROM pg_class c
    LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
    LEFT JOIN pg_class parent ON parent.oid = i.inhparent
   WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
     AND (NOT c.relispartition OR pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT')
   ORDER BY c.relname COLLATE "C"`

const columns = `
  SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,
         a.attidentity AS identity, a.attgenerated AS generated, pg_get_expr(d.adbin, d.adrelid) AS default_value,
         CASE WHEN a.attcollation <> t.typcollation THEN a.attcollation::regcollation::text END AS collation,
         a.attcompression AS compression, a.attstorage <> t.typstorage AS stored_otherwise, a.attstorage AS storage,
         a.attstattarget AS statistics_target
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
   WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
   ORDER BY a.attnum`

/** Without NOT NULL, which PostgreSQL 18 lists here and earlier ones do not; it stands with its column. */
const constraints = `
  SELECT conname AS name, pg_get_constraintdef(oid) AS definition
    FROM pg_constraint
   WHERE conrelid = $1 AND contype <> 'n' AND conparentid = 0
   ORDER BY conname COLLATE "C"`

const indexes = `
  SELECT pg_get_indexdef(i.indexrelid) AS definition
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
   WHERE i.indrelid = $1 AND NOT c.relispartition
     AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid AND k.contype IN ('p', 'u', 'x'))
   ORDER BY c.relname COLLATE "C"`

const triggers = `
  SELECT pg_get_triggerdef(oid) AS definition, tgenabled AS enabled, tgname AS name
    FROM pg_trigger
   WHERE tgrelid = $1 AND NOT tgisinternal AND tgparentid = 0
   ORDER BY tgname COLLATE "C"`

const sequences = `
  SELECT c.relname AS name, format_type(s.seqtypid, NULL) AS type, s.seqstart AS start, s.seqincrement AS increment,
         s.seqmin AS min, s.seqmax AS max, s.seqcache AS cache, s.seqcycle AS cycle,
         (SELECT format('%s.%s', d.refobjid::regclass, a.attname)
            FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
           WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i')) AS owner
    FROM pg_sequence s
    JOIN pg_class c ON c.oid = s.seqrelid
   WHERE c.relnamespace = $1::regnamespace
   ORDER BY c.relname COLLATE "C"`

const types = `
  SELECT t.typname AS name, t.typtype AS kind, format_type(t.typbasetype, t.typtypmod) AS base,
         (SELECT string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder)
            FROM pg_enum e WHERE e.enumtypid = t.oid) AS labels,
         (SELECT string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum)
            FROM pg_attribute a
           WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS members,
         (SELECT string_agg(pg_get_constraintdef(k.oid), ' ' ORDER BY k.conname COLLATE "C")
            FROM pg_constraint k WHERE k.contypid = t.oid) AS checks
    FROM pg_type t
    LEFT JOIN pg_class c ON c.oid = t.typrelid
   WHERE t.typnamespace = $1::regnamespace AND (t.typtype IN ('e', 'd') OR (t.typtype = 'c' AND c.relkind = 'c'))
   ORDER BY t.typname COLLATE "C"`

const functions = `
  SELECT pg_get_functiondef(p.oid) AS definition
    FROM pg_proc p
   WHERE p.pronamespace = $1::regnamespace AND p.prokind IN ('f', 'p')
     AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
   ORDER BY p.proname COLLATE "C", pg_get_function_identity_arguments(p.oid) COLLATE "C"`

function columnText(column) {
  const parts = [column.name, column.type]
  if (column.collation) parts.push(`COLLATE ${column.collation}`)
  if (column.generated) parts.push(`GENERATED ALWAYS AS (${column.default_value}) STORED`)
  else if (column.identity) parts.push(`GENERATED ${column.identity === 'a' ? 'ALWAYS' : 'BY DEFAULT'} AS IDENTITY`)
  else if (column.default_value !== null) parts.push(`DEFAULT ${column.default_value}`)
  if (column.not_null) parts.push('NOT NULL')
  return parts.join(' ')
}

/** What CREATE TABLE has no place for. */
function columnSettings(table, column) {
  const alter = `ALTER TABLE ${table} ALTER COLUMN ${column.name} SET`
  const settings = []
  if (column.stored_otherwise) {
    const names = { p: 'PLAIN', e: 'EXTERNAL', m: 'MAIN', x: 'EXTENDED' }
    settings.push(`${alter} STORAGE ${names[column.storage]};`)
  }
  if (column.compression) settings.push(`${alter} COMPRESSION ${column.compression === 'l' ? 'lz4' : 'pglz'};`)
  if (column.statistics_target !== null && column.statistics_target >= 0) {
    settings.push(`${alter} STATISTICS ${column.statistics_target};`)
  }
  return settings
}

async function relationText(query, relation) {
  if (relation.kind === 'v' || relation.kind === 'm') {
    return [`CREATE ${relation.kind === 'm' ? 'MATERIALIZED ' : ''}VIEW ${relation.name} AS\n${relation.view}`]
  }
  const columnRows = await query(columns, relation.oid)
  const constraintRows = await query(constraints, relation.oid)
  const lines = columnRows.map(columnText)
  for (const { name, definition } of constraintRows) lines.push(`CONSTRAINT ${name} ${definition}`)
  const kind = relation.persistence === 'u' ? 'UNLOGGED TABLE' : 'TABLE'
  let create = `CREATE ${kind} ${relation.name}`
  // A partition has its parent's columns and constraints.
  if (relation.parent) create += ` PARTITION OF ${relation.parent} ${relation.bound}`
  else create += ` (\n  ${lines.join(',\n  ')}\n)`
  if (relation.partition_key) create += ` PARTITION BY ${relation.partition_key}`
  if (relation.options) create += ` WITH (${[...relation.options].sort().join(', ')})`
  const text = [`${create};`]
  if (relation.comment) text.push(`COMMENT ON TABLE ${relation.name} IS '${relation.comment.replaceAll("'", "''")}';`)
  for (const column of columnRows) text.push(...columnSettings(relation.name, column))
  for (const { definition } of await query(indexes, relation.oid)) text.push(`${definition};`)
  for (const { definition, enabled, name } of await query(triggers, relation.oid)) {
    text.push(`${definition};`)
    if (enabled === 'A') text.push(`ALTER TABLE ${relation.name} ENABLE ALWAYS TRIGGER ${name};`)
    if (enabled === 'D') text.push(`ALTER TABLE ${relation.name} DISABLE TRIGGER ${name};`)
  }
  return text
}

function sequenceText({ name, type, start, increment, min, max, cache, cycle, owner }) {
  const range = `START ${start} INCREMENT ${increment} MINVALUE ${min} MAXVALUE ${max} CACHE ${cache}`
  return `CREATE SEQUENCE ${name} AS ${type} ${range}${cycle ? ' CYCLE' : ''}${owner ? ` OWNED BY ${owner}` : ''};`
}

function typeText({ name, kind, base, labels, members, checks }) {
  if (kind === 'e') return `CREATE TYPE ${name} AS ENUM (${labels ?? ''});`
  if (kind === 'd') return `CREATE DOMAIN ${name} AS ${base}${checks ? ` ${checks}` : ''};`
  return `CREATE TYPE ${name} AS (${members ?? ''});`
}

/** `client` is a connected pg client; its search_path is changed, so that names of the schema stand unqualified. */
export async function dumpSchema(client, schema) {
  await client.query("SELECT set_config('search_path', quote_ident($1), false)", [schema])
  const query = async (text, value) => (await client.query(text, [value])).rows
  const quoted = (await query('SELECT quote_ident($1) AS name', schema))[0].name
  const sections = []
  for (const row of await query(types, quoted)) sections.push([typeText(row)])
  for (const row of await query(sequences, quoted)) sections.push([sequenceText(row)])
  for (const row of await query(relations, quoted)) sections.push(await relationText(query, row))
  for (const { definition } of await query(functions, quoted)) sections.push([`${definition.trimEnd()};`])
  return `${sections.map((lines) => lines.join('\n')).join('\n\n')}\n`.replace(/[^\S\n]+$/gm, '')
}
