/**
 * Converts query, path and header values, which come as text, to the type of their schema, if they match exactly. TypeBox's
 * own conversion is too lenient: it makes 1 of "1.5" and 0 of "".
 */
function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

const numberForm = /^-?(?:0|[1-9]\d*)(?:\.\d+)?$/

function convertText(schema: unknown, text: string): unknown {
  if (!isRecord(schema)) return text
  const alternatives = schema.anyOf ?? schema.oneOf
  if (Array.isArray(alternatives)) {
    for (const alternative of alternatives) {
      const converted = convertText(alternative, text)
      if (converted !== text) return converted
    }
    return text
  }
  switch (schema.type) {
    case 'integer':
    case 'number':
      return numberForm.test(text) ? Number(text) : text
    case 'boolean':
      return text === 'true' ? true : text === 'false' ? false : text
    case 'array':
      return [convertText(schema.items, text)]
    default:
      return text
  }
}

export function convertTexts(schema: unknown, values: unknown): unknown {
  if (!isRecord(schema) || !isRecord(schema.properties) || !isRecord(values)) return values
  const converted: Record<string, unknown> = { ...values }
  for (const [name, member] of Object.entries(schema.properties)) {
    const value = values[name]
    if (typeof value === 'string') converted[name] = convertText(member, value)
    else if (Array.isArray(value) && isRecord(member) && member.type === 'array') {
      converted[name] = value.map((item) => (typeof item === 'string' ? convertText(member.items, item) : item))
    }
  }
  return converted
}
